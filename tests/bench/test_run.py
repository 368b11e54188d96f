"""Runs from the command line, against a server that follows a script."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxserve.bench.run import _warmups
from jaxserve.bench.vocabulary import Vocabulary
from jaxserve.bench.workload import Sample, Workload
from jaxserve.cli.main import app
from tests.bench.fake_server import Exchange, FakeServer, Script, answer

MODEL = "jaxserve-python-6m"  # whose tokenizer is at hand
METRICS = b"# TYPE jaxserve_num_requests_running gauge\njaxserve_num_requests_running 2.0\n"


@contextmanager
def running(script: Script) -> Iterator[FakeServer]:
    """Run a server on its own event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def do(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(10)

    server = FakeServer(script)
    try:
        do(server.__aenter__())
        yield server
    finally:
        do(server.__aexit__())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def serving(completions: Script) -> Script:
    """Return the script of a complete server: a model, metrics, and `completions` for all posted requests."""

    async def script(exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            await exchange.whole(200, json.dumps({"data": [{"id": MODEL}]}).encode())
        elif exchange.path == "/metrics":
            await exchange.whole(200, METRICS)
        else:
            await completions(exchange)

    return script


def bench(*args: str) -> tuple[int, str]:
    """Return exit status and output of `jaxserve bench ...`."""
    done = CliRunner().invoke(app, ["bench", *args])
    return done.exit_code, done.output


def asked(server: FakeServer) -> list[dict]:
    """Return the bodies of the requests for completions."""
    return [exchange.body for exchange in server.exchanges if exchange.body]


def measured(tmp_path: Path, *args: str, script: Script = answer) -> tuple[dict, str, list[dict]]:
    """Return the result of a run, its output, and the requests that the server received."""
    path = tmp_path / "result.json"
    with running(serving(script)) as server:
        status, output = bench(*args, "--base-url", server.url, "--save-result", str(path), "--quiet")
        assert status == 0, output
        return json.loads(path.read_text()), output, asked(server)


def test_serve_sends_and_reports_the_requested_load(tmp_path):
    result, output, bodies = measured(
        tmp_path, "serve", "--num-prompts", "6", "--input-len", "5", "--output-len", "3", "--num-warmups", "2",
        "--extra-body", '{"temperature": 0.5}', "--ignore-eos", "--label", "mine", "--seed", "7",
    )  # fmt: skip
    assert (result["kind"], result["completed"], result["failed"], result["label"]) == ("serve", 6, 0, "mine")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (6 * 7, 18)  # as its usage says
    assert result["request_rate"] == "inf"
    assert result["model_id"] == result["tokenizer_id"] == MODEL
    assert (result["seed"], result["workload"]["dataset"]) == (7, "random")
    assert result["server"]["num_requests_running"][0] == 2
    assert "Successful requests" in output
    assert "Mean TTFT (ms)" in output
    assert len(bodies) == 8
    assert {len(body["prompt"]) for body in bodies} == {5}
    assert len({tuple(body["prompt"]) for body in bodies}) == 8  # warming up tells the prefix cache nothing
    assert all(body["max_tokens"] == 3 and body["temperature"] == 0.5 and body["ignore_eos"] for body in bodies)


def test_equal_seeds_send_equal_prompts(tmp_path):
    args = ("serve", "--num-prompts", "4", "--request-rate", "200", "--input-len", "uniform:3,9", "--num-warmups", "0")
    prompts = [
        sorted(body["prompt"] for body in measured(tmp_path, *args, "--seed", seed)[2]) for seed in ("1", "1", "2")
    ]
    assert prompts[0] == prompts[1] != prompts[2]


def test_goodput_takes_objectives_in_a_row_as_vllm_does(tmp_path):
    result, output, _ = measured(
        tmp_path, "serve", "--num-prompts", "2", "--input-len", "4", "--goodput", "ttft:60000", "e2el:0.0001",
        "--percentile-metrics", "ttft,e2el", "--metric-percentiles", "25,75",
    )  # fmt: skip
    assert result["slo"] == {"ttft": 60000, "e2el": 0.0001}
    assert (result["request_goodput"], result["slo_violation_rate"]) == (0, 1)
    assert {"p25_ttft_ms", "p75_ttft_ms", "p95_ttft_ms", "p99_ttft_ms"} <= result.keys()
    assert "P75 TTFT (ms)" in output
    assert "P95 TTFT (ms)" not in output
    assert "TPOT" not in output


def test_chat_endpoint_gets_text(tmp_path):
    result, _, bodies = measured(
        tmp_path, "serve", "--num-prompts", "2", "--input-len", "12", "--endpoint", "chat", script=chat_answer
    )
    assert (result["completed"], result["backend"]) == (2, "openai-chat")
    assert all(isinstance(body["messages"][0]["content"], str) for body in bodies)


async def chat_answer(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.delta(content="hello")
    await exchange.usage(12, 1)
    await exchange.done()


def test_a_trace_is_replayed_with_its_lengths_and_its_scaling_is_recorded(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,10,2\n0.02,20,3\n0.05,30,4\n9,9,9\n")
    result, _, bodies = measured(
        tmp_path, "trace", str(trace), "--window", "0:1", "--stretch", "0.5", "--clip-lengths", "25/3",
        "--num-warmups", "0",
    )  # fmt: skip
    assert result["kind"] == "trace"
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in bodies) == [(10, 2), (20, 3), (25, 3)]
    assert result["arrival_times"] == pytest.approx([0, 0.01, 0.025])
    assert all(body["ignore_eos"] for body in bodies)  # the lengths are the trace's
    operations = [entry["operation"] for entry in result["workload"]["history"]]
    assert operations[-3:] == ["window", "stretch", "clip_lengths"]


def test_trace_with_a_profile_is_generated(tmp_path):
    args = ("--synthetic", "azure-code", "--duration", "2", "--rate", "10", "--fixed-lengths", "4/2")
    result, _, bodies = measured(tmp_path, "trace", *args, "--num-warmups", "0")
    assert result["completed"] == len(bodies) > 0
    assert {len(body["prompt"]) for body in bodies} == {4}


def test_serve_reads_a_conversation_file(tmp_path):
    file = tmp_path / "conversations.jsonl"
    file.write_text('{"prompt": "def add(a, b):\\n    return", "completion": " a + b  # the sum of both"}\n')
    args = ("serve", "--dataset", "sharegpt", "--dataset-path", str(file), "--num-prompts", "2", "--output-len", "5")
    result, _, bodies = measured(tmp_path, *args, "--prompt-format", "text", "--num-warmups", "0")
    assert [body["prompt"] for body in bodies] == ["def add(a, b):\n    return"] * 2
    assert result["completed"] == 2


def test_serve_sends_shared_prefixes(tmp_path):
    sizes = ("--num-prefixes", "2", "--prefix-len", "6", "--input-len", "3", "--num-prompts", "6")
    _, _, bodies = measured(tmp_path, "serve", "--dataset", "prefix-repetition", *sizes, "--num-warmups", "0")
    assert len({tuple(body["prompt"][:6]) for body in bodies}) == 2
    assert {len(body["prompt"]) for body in bodies} == {9}


def test_failures_are_counted_with_their_reasons(tmp_path):
    async def every_other(exchange: Exchange) -> None:
        if len(exchange.body["prompt"]) % 2:
            await exchange.whole(503, b'{"error": {"message": "the queue is full"}}')
        else:
            await answer(exchange)

    args = ("serve", "--num-prompts", "8", "--input-len", "uniform:1,40", "--num-warmups", "0", "--seed", "3")
    result, output, bodies = measured(tmp_path, *args, script=every_other)
    refused = sum(len(body["prompt"]) % 2 for body in bodies)
    assert (result["failed"], result["completed"]) == (refused, 8 - refused)
    assert 0 < refused < 8
    assert "the queue is full" in output


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["serve", "--goodput", "ttft:fast"], "--goodput"),
        (["serve", "--goodput", "latency:5"], "--goodput"),
        (["serve", "--metric-percentiles", "99,x"], "--metric-percentiles"),
        (["serve", "--percentile-metrics", "ttft,cost"], "--percentile-metrics"),
        (["serve", "--input-len", "many"], "many"),
        (["serve", "--input-len", "0"], "0"),
        (["serve", "--num-prompts", "0"], "--num-prompts"),
        (["serve", "--request-rate", "-1"], "--request-rate"),
        (["serve", "--burstiness", "0"], "--burstiness"),
        (["serve", "--ramp-up", "linear:1"], "--ramp-up"),
        (["serve", "--ramp-up", "steep:1:2"], "steep"),
        (["serve", "--dataset", "sharegpt"], "--dataset-path"),
        (["serve", "--dataset", "trace"], "--trace"),
        (["serve", "--trace", "trace.csv"], "--dataset trace"),
        (["serve", "--scale-lengths", "0.5"], "--scale-lengths"),
        (["serve", "--dataset", "trace", "--synthetic", "azure-code", "--num-prompts", "5"], "--num-prompts"),
        (["serve", "--dataset", "trace", "--synthetic", "azure-code", "--request-rate", "5"], "--request-rate"),
        (["serve", "--dataset-path", "chats.json"], "--dataset-path"),
        (["serve", "--ramp-up", "linear:1:2", "--request-rate", "3"], "--request-rate"),
        (["serve", "--input-len", "9" * 12], "9" * 12),
        (["serve", "--timeout", "nan"], "--timeout"),
        (["serve", "--port", "80"], "--port"),
        (["serve", "--backend", "openai-chat", "--endpoint", "completions"], "--backend"),
        (["serve", "--ramp-up-strategy", "linear"], "--ramp-up-end-rps"),
        (["serve", "--save-result", "a.json", "--result-dir", "b"], "--result-dir"),
        (["serve", "--save-result", "--result-filename", "b"], ".json"),
        (["serve", "--metrics-interval", "-1"], "--metrics-interval"),
        (["serve", "--spawn"], "--base-url"),
        (["serve", "--serve-args", "--tp 2"], "--serve-args"),
        (["compare", "--run", "a=", "--run", "b=--tp 2"], "--base-url"),
        (["trace", "trace.csv", "--synthetic", "azure-code"], "not both"),
        (["trace", "trace.csv", "--duration", "5"], "--duration"),
        (["trace", "--synthetic", "azure-code", "--duration", "1e12"], "--duration"),
        (["trace", "--synthetic", "azure-code", "--replicate", "9" * 9], "--replicate"),
        (["trace", "--synthetic", "azure-code", "--fixed-lengths", "9" * 12 + "/1"], "9" * 12),
        (["serve", "--extra-body", "{"], "--extra-body"),
        (["serve", "--extra-body", "[1]"], "--extra-body"),
        (["serve", "--endpoint", "chat", "--prompt-format", "tokens"], "--prompt-format"),
        (["serve", "--model", "another"], "another"),
        (["serve", "--tokenizer", "/no/such/folder"], "--tokenizer"),
        (["trace"], "--trace"),
        (["trace", "/no/such/trace.csv"], "/no/such/trace.csv"),
        (["trace", "--synthetic", "weather"], "weather"),
        (["trace", "--synthetic", "azure-code", "--window", "5"], "--window"),
        (["trace", "--synthetic", "azure-code", "--fixed-lengths", "5:2"], "--fixed-lengths"),
    ],
)
def test_invalid_options_print_one_line_and_send_nothing(args, told):
    with running(serving(answer)) as server:
        status, output = bench(*args, "--base-url", server.url)
        assert status == 1
        assert output.startswith("jaxserve: ")
        assert told in output
        assert "Traceback" not in output
        assert not asked(server)


def test_a_command_line_of_vllm_is_understood(tmp_path):
    with running(serving(answer)) as server:
        status, output = bench(
            "serve", "--backend", "vllm", "--host", "127.0.0.1", "--port", server.url.rpartition(":")[2],
            "--endpoint", "/v1/completions", "--dataset_name", "prefix_repetition", "--num-prompts", "4",
            "--prefix-repetition-num-prefixes", "2", "--prefix_repetition_prefix_len", "6",
            "--prefix-repetition-suffix-len=3", "--prefix-repetition-output-len", "2",
            "--ramp-up-strategy", "linear", "--ramp-up-start-rps", "50", "--ramp-up-end-rps", "100",
            "--temperature", "0", "--disable-tqdm", "--goodput", "ttft:60000", "tpot:60000",
            "--save-result", "--result-dir", str(tmp_path / "results"), "--result-filename", "mine.json",
        )  # fmt: skip
        assert status == 0, output
        bodies = asked(server)
    result = json.loads((tmp_path / "results" / "mine.json").read_text())
    assert (result["completed"], result["request_goodput"]) == (4, result["request_throughput"])
    assert result["workload"]["ramp_up"] == "linear:50:100"
    assert {(len(body["prompt"]), body["max_tokens"], body["temperature"]) for body in bodies} == {(9, 2, 0)}


def test_backend_openai_chat_means_messages(tmp_path):
    args = ("serve", "--backend", "openai-chat", "--num-prompts", "1", "--input-len", "8")
    assert measured(tmp_path, *args, script=chat_answer)[0]["backend"] == "openai-chat"


def test_save_result_without_a_name_saves_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with running(serving(answer)) as server:
        assert bench("serve", "--save-result", "--base-url", server.url, "--num-prompts", "1", "--label", "a")[0] == 0
        assert bench("serve", "--base-url", server.url, "--num-prompts", "1", "--label", "b", "--save-result")[0] == 0
    assert sorted(path.name[0] for path in tmp_path.glob("*.json")) == ["a", "b"]


@pytest.mark.parametrize(
    "option", [["--seed", "-1"], ["--num-warmups", "-1"], ["--max-concurrency", "0"], ["--prefix-len", "-1"]]
)
def test_option_out_of_range_is_named(option):
    status, output = bench("serve", *option)
    assert status == 2
    assert option[0] in output
    assert "Traceback" not in output


def test_run_without_answers_fails():
    with running(serving(lambda exchange: exchange.whole(500, b"{}"))) as server:
        status, output = bench("serve", "--base-url", server.url, "--num-prompts", "2", "--num-warmups", "0")
    assert status == 1
    assert "Failed requests" in output


def test_missing_server_is_reported_with_its_url():
    status, output = bench("serve", "--base-url", "http://127.0.0.1:9")
    assert status == 1
    assert "cannot reach http://127.0.0.1:9: " in output
    assert "--spawn" in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("named", [(), ("none.csv",)])
def test_missing_trace_is_reported_before_the_server_is_asked(named):
    status, output = bench("trace", *named, "--base-url", "http://127.0.0.1:9")
    assert (status, output.count("\n")) == (1, 1)
    assert "trace" in output
    assert "cannot reach" not in output


def listing(status: int, body: bytes) -> Script:
    """Return the script of a server that answers requests for its models in this way, and others as usual."""

    async def script(exchange: Exchange) -> None:
        await (exchange.whole(status, body) if exchange.path == "/v1/models" else serving(answer)(exchange))

    return script


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (401, b'{"error": {"message": "no such key: s3cret"}}', "HTTP 401: no such key: *** (--api-key)"),
        (200, b'{"data": []}', "serves no model"),
        (200, b'{"data": [{"name": "x"}]}', "returned no list of models"),
        (200, b"<html>", "returned no list of models"),
        (404, b"", "HTTP 404"),
    ],
)
def test_server_without_a_model_list_is_reported(status, body, told):
    with running(listing(status, body)) as server:
        url = server.url.replace("//", "//user:s3cret@")
        code, output = bench("serve", "--base-url", url, "--api-key", "s3cret")
    assert (code, output.count("\n")) == (1, 1)
    assert told in output
    assert "s3cret" not in output


def test_named_model_needs_no_model_list():
    with running(listing(404, b"")) as server:
        args = ("serve", "--base-url", server.url, "--model", "mine", "--tokenizer", MODEL, "--num-prompts", "2")
        assert bench(*args)[0] == 0
        assert {body["model"] for body in asked(server)} == {"mine"}


def test_a_refused_warm_up_ends_the_run_before_it_begins():
    with running(serving(lambda e: e.whole(401, b'{"error": {"message": "wrong key"}}'))) as server:
        status, output = bench("serve", "--base-url", server.url, "--num-prompts", "50")
        assert status == 1
        assert "wrong key" in output
        assert len(asked(server)) == 1


def test_warm_ups_are_as_long_as_what_is_measured_and_of_other_tokens():
    vocabulary = Vocabulary.load()
    workload = Workload.of([Sample((5, 6, 7), 3, 9), Sample((5, 6), 2, 8)], [0, 1], {"seed": 0})
    warmups = list(_warmups(workload, vocabulary, 5, as_text=False))
    assert [(len(sample.prompt), sample.output_tokens) for sample in warmups] == [(3, 9), (2, 8)]
    assert warmups[0].prompt != (5, 6, 7)


def interrupted(args: list[str], ready: Callable[[], bool], by: int = signal.SIGINT) -> tuple[int, str]:
    """Return exit status and output of a run that gets a signal as soon as `ready` returns True."""
    command = [sys.executable, "-m", "jaxserve.cli.main", "bench", *args]
    environment = {**os.environ, "COLUMNS": "200"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        while not ready():
            assert process.poll() is None, process.stdout.read()
        process.send_signal(by)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, output


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_saves_what_was_measured(tmp_path, by):
    answered = threading.Event()
    count = 0

    async def two_then_none(exchange: Exchange) -> None:
        nonlocal count
        count += 1
        if count <= 2:
            await answer(exchange)
            return
        answered.set()
        await asyncio.sleep(3600)

    path = tmp_path / "result.json"
    with running(serving(two_then_none)) as server:
        args = ["serve", "--base-url", server.url, "--num-prompts", "4", "--input-len", "4", "--num-warmups", "0"]
        args += ["--request-rate", "20", "--save-result", str(path)]
        status, output = interrupted(args, lambda: answered.wait(0.1), by)
    result = json.loads(path.read_text())
    assert (status, result["interrupted"]) == (130, True)
    assert (result["completed"], result["failed"]) == (2, 0)
    assert "Successful requests" in output
    assert "Traceback" not in output


def test_unwritable_result_path_is_refused_before_the_run(tmp_path):
    file = tmp_path / "file"
    file.write_text("no folder")
    with running(serving(answer)) as server:
        for path in (file / "result.json", file):  # in a file, and a file as a folder
            status, output = bench("serve", "--base-url", server.url, "--save-result", str(path))
            assert status == 1
            assert "--save-result" in output
        assert not asked(server)
