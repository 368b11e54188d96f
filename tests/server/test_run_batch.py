"""`jaxserve run-batch` as a user starts it, on a tiny random model."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.server.process import PATIENCE, ROOT, started

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


def request(custom_id: str, url: str = COMPLETIONS, **body) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


@pytest.fixture(scope="module")
def options(random_model, tmp_path_factory):
    """Return options for a small machine. All runs share a compilation cache."""
    cache = tmp_path_factory.mktemp("cache")
    small = ("--max-num-seqs=4", "--max-num-batched-tokens=68", "--max-model-len=256")
    return (str(random_model), "--load-format=dummy", *small, f"--compile-cache={cache}")


def command(source: Path, output: Path, *options: str) -> list[str]:
    return ["-m", "jaxserve.cli.main", "run-batch", "-i", str(source), "-o", str(output), *options]


def run(*arguments) -> tuple[int, str]:
    """Return the exit status of a run and what it says."""
    with started(*command(*arguments)) as process:
        out, errors = process.communicate(timeout=PATIENCE)
        assert out == ""
        return process.returncode, errors


def answers(output: Path) -> dict[str, dict]:
    return {answer["custom_id"]: answer for answer in map(json.loads, output.read_text().splitlines())}


def test_batch_is_answered_and_not_computed_twice(tmp_path, options):
    source, output, config = tmp_path / "in.jsonl", tmp_path / "new" / "out.jsonl", tmp_path / "server.yaml"
    config.write_text("api-key: secret\nroot-path: /llm\n")  # of a server, whose clients need it
    options = (*options, f"--config={config}")
    source.write_text(
        request("text", prompt="def f(x):", max_tokens=8, temperature=0)
        + request("chat", CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=4)
        + request("vector", EMBEDDINGS, input="hi")
        + request("same", "/v1/score", text_1="def f(x):", text_2="def f(x):")
    )
    status, said = run(source, output, *options)
    assert status == 0, said
    assert "4 of 4 requests answered: " in said
    found = answers(output)
    assert {answer["response"]["status_code"] for answer in found.values()} == {200}
    assert found["text"]["response"]["body"]["usage"]["completion_tokens"] == 8
    assert found["same"]["response"]["body"]["data"][0]["score"] == pytest.approx(1)
    before = output.read_bytes()
    status, said = run(source, output, *options)
    assert (status, output.read_bytes()) == (0, before)
    assert "4 of 4 requests answered (4 of them earlier): " in said


PIPED = """
import jaxserve.build
from jaxserve.cli import main
from tests.server.fake import FakeClient
jaxserve.build.build_async_engine = lambda *_: FakeClient()
main.main()
"""


@pytest.mark.parametrize(("source", "output"), [("-", "-"), ("/dev/stdin", "/dev/stdout"), ("fifo", "fifo")])
def test_batch_passes_through_pipes(tmp_path, source, output):
    """With a fake engine, whose answers come at once."""
    body = request("one", prompt="a", max_tokens=3) + request("two", prompt="b", max_tokens=3)
    program = tmp_path / "batch.py"
    program.write_text(PIPED)
    ends, writer = [source, output], None
    if source == "fifo":
        ends = [str(tmp_path / "in"), str(tmp_path / "out")]
        for path in ends:
            os.mkfifo(path)
        writer = threading.Thread(target=Path(ends[0]).write_text, args=(body,), daemon=True)
        writer.start()
    arguments = (str(program), "run-batch", "-i", ends[0], "-o", ends[1])
    with started(*arguments, stdin=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}) as process:
        written = Path(ends[1]).read_text() if writer else ""
        out, errors = process.communicate(None if writer else body, timeout=PATIENCE)
    assert process.returncode == 0, errors
    lines = (written or out).splitlines()
    assert {answer["custom_id"]: answer["response"]["status_code"] for answer in map(json.loads, lines)} == {
        "one": 200,
        "two": 200,
    }
    assert "2 of 2 requests answered" in errors


def test_interrupted_batch_is_continued(tmp_path, options):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(request(f"{i}", prompt=f"{i}", max_tokens=200, ignore_eos=True) for i in range(40)))
    with started(*command(source, output, *options)) as process:
        deadline = time.monotonic() + PATIENCE
        while not (output.exists() and output.read_bytes().count(b"\n")):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, errors
    assert "left: " in errors
    assert "the same command continues" in errors
    assert "Traceback" not in errors
    first = output.read_bytes()
    assert 0 < len(answers(output)) < 40
    code, said = run(source, output, *options)
    assert code == 0, said
    assert output.read_bytes().startswith(first)
    assert answers(output).keys() == {f"{i}" for i in range(40)}


def test_failed_requests_give_status_1(tmp_path, options):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(request("a", prompt="a", max_tokens=1) + request("b", prompt="a", temperature=-1) + "{\n")
    status, said = run(source, output, *options)
    assert status == 1
    assert "1 of 3 requests answered, 2 failed: " in said


def test_foreign_output_is_refused_before_the_model_is_loaded(tmp_path, options):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(request("a", prompt="a"))
    output.write_text("important\n")
    status, said = run(source, output, *options)
    assert status == 1
    assert "is not an answer of run-batch" in said
    assert "Traceback" not in said
    assert output.read_text() == "important\n"


@pytest.mark.parametrize("missing", ["-i", "-o"])
def test_both_files_must_be_named(tmp_path, missing):
    given = [text for text in ("-i", "-o") if text != missing]
    with started("-m", "jaxserve.cli.main", "run-batch", *given, str(tmp_path / "x")) as process:
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert missing in errors
