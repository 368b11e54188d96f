import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.bench.record import RequestRecord
from jaxserve.bench.redaction import masked, masked_command
from jaxserve.bench.result import build, label, load, per_request, plain, save
from jaxserve.core.errors import ConfigError

DATE = datetime(2026, 11, 20, 18, 30, 5, tzinfo=UTC)


def made(**more: Any) -> dict[str, Any]:
    return build("serve", date=DATE, command=["jaxserve", "bench", "serve"], environment={"cpu": "some CPU"}, **more)


def record(index: int = 0, **more: Any) -> RequestRecord:
    return RequestRecord(index, due_s=1.0, arrival_s=1.0, input_tokens=7, **more)


COMPLETED = {"chunk_times_s": [1.25, 1.5, 2.0], "end_s": 2.125, "output_tokens": 3, "text": "abc"}


def test_result_has_the_keys_of_vllm():
    target = {"backend": "openai", "model_id": "tiny", "request_rate": math.inf, "num_prompts": 1}
    result = made(seed=3, target=target, summary={"completed": 1, "mean_ttft_ms": 12.5}, records=[record(**COMPLETED)])
    assert result["date"] == "20261120-183005"
    assert result["request_rate"] == "inf"
    assert (result["completed"], result["mean_ttft_ms"], result["seed"]) == (1, 12.5, 3)
    assert (result["input_lens"], result["output_lens"], result["errors"]) == ([7], [3], [""])
    assert (result["ttfts"], result["itls"], result["latencies"]) == ([0.25], [[0.25, 0.5]], [1.0])
    assert "generated_texts" not in result


def test_texts_are_kept_when_asked_for():
    assert per_request([record(**COMPLETED)], texts=True)["generated_texts"] == ["abc"]


def test_failed_requests_are_listed_and_unfinished_ones_are_not():
    records = [
        record(0, **COMPLETED),
        record(1, end_s=1.5, error="HTTP 503"),
        record(2, chunk_times_s=[1.1]),  # the run was interrupted
    ]
    lists = per_request(records)
    assert lists["errors"] == ["", "HTTP 503"]
    assert lists["ttfts"] == [0.25, 0.0]
    assert lists["latencies"] == [1.0, 0.5]
    assert {len(values) for values in lists.values()} == {2}


def test_start_times_are_due_times():
    held_back = RequestRecord(0, due_s=3.0, arrival_s=1.0, input_tokens=7, chunk_times_s=[3.5], end_s=3.5)
    lists = per_request([held_back])
    assert (lists["arrival_times"], lists["start_times"], lists["ttfts"]) == ([1.0], [3.0], [0.5])


def test_saved_result_has_no_nan_or_infinity(tmp_path: Path):
    server = {"t": np.array([0.0, 1.0]), "gauge": [math.nan, np.float32(2)]}
    save(made(server=server, summary={"mean_tpot_ms": math.nan}), tmp_path / "result.json")
    text = (tmp_path / "result.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text)["server"] == {"t": [0.0, 1.0], "gauge": [None, 2.0]}
    assert plain((math.inf, -math.inf)) == ["inf", "-inf"]


def test_saved_result_loads_unchanged(tmp_path: Path):
    result = made(target={"label": "mine"}, records=[record(**COMPLETED)], rows=[{"batch": 8, "step_ms": 1.5}])
    path = tmp_path / "new folder" / "result.json"
    save(result, path)
    assert load(path) == result
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]


def test_a_result_that_cannot_be_written_leaves_the_old_one(tmp_path: Path):
    path = tmp_path / "result.json"
    save(made(), path)
    before = path.read_text()
    with pytest.raises(ValueError, match="Out of range float"):
        save({"schema_version": 1, "broken": math.nan}, path)
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_an_unlabelled_result_is_called_after_its_file(tmp_path: Path):
    save(made(target={"model_id": "tiny"}), tmp_path / "before.json")
    assert label(load(tmp_path / "before.json")) == "before"
    assert label(made(target={"model_id": "tiny"})) == "tiny"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "not valid JSON"),
        ("[1, 2]", "not a result"),
        ('{"completed": 3}', "no schema_version"),
        ('{"schema_version": 99}', "schema version 99: this jaxserve reads 1"),
    ],
)
def test_file_that_is_not_a_result_is_refused_and_named(tmp_path: Path, content: str, complaint: str):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=complaint) as error:
        load(path)
    assert "other.json" in str(error.value)


def test_missing_result_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"missing\.json: No such file"):
        load(tmp_path / "missing.json")


SECRET = "sk-12345"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--api-key", SECRET],
        [f"--api-key={SECRET}"],
        ["--serve-args", f"MODEL --api-key {SECRET} --tp 2"],
        ["--run", f"a=MODEL --api-key={SECRET}"],
        ["--extra-body", json.dumps({"api_key": SECRET, "top_k": 1})],
        ["--header", f"Authorization: Bearer {SECRET}"],
        ["--base-url", f"http://someone:{SECRET}@host:8000"],
        ["env", f"JAXSERVE_API_KEY={SECRET}"],
    ],
)
def test_no_secret_of_a_command_is_saved(arguments: list[str]):
    result = build("serve", date=DATE, command=["jaxserve", "bench", *arguments], environment={})
    assert SECRET not in json.dumps(result)
    assert "***" in result["command"]


def test_text_without_secrets_is_unchanged():
    command = ["--tokenizer", "gpt2", "--max-num-batched-tokens", "2048", "--api-key", "--seed", "1"]
    assert masked_command(command) == [*command[:5], "***", "1"]
    configuration = {"tokenizer": "gpt2", "max_tokens": 5, "dataset": "random"}
    assert masked(configuration) == configuration


def test_no_secret_of_the_target_is_saved():
    target = {"base_url": f"http://u:{SECRET}@host", "api_key": SECRET, "extra_body": {"headers": {"x-token": SECRET}}}
    assert SECRET not in json.dumps(made(target=target, workload={"spawn": f"--api-key {SECRET}"}))


def test_result_of_vllm_is_read_without_per_request_lists(tmp_path):
    figures = {"completed": 3, "duration": 2.0, "request_throughput": 1.5, "mean_ttft_ms": 9.0, "mean_tpot_ms": 2.0}
    path = tmp_path / "vllm.json"
    path.write_text(
        json.dumps(figures | {"backend": "vllm", "start_times": [812.5, 813.5, 814.5], "errors": ["", "", ""]})
    )
    result = load(path)
    assert result.items() >= figures.items()
    assert (result["kind"], result["label"], result["interrupted"]) == ("serve", "vllm", False)
    assert "start_times" not in result
