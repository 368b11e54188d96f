"""bench.peers: options, arithmetic, the table, interruption and failing workers."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.peers.__main__ import parse
from bench.peers.report import medians, ratios, share, summary, table
from bench.peers.turns import Outcome, Worker, WorkerFailed, turns_of
from bench.peers.workload import CaseLengths, cases, token_bytes

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = {"decode_1": [8.0], "decode_8": [16.0], "prefill": [1000.0]}
ENGINE = {"weights": 50.0, "token": 0.0, "memory": 1.0, "first_tokens": [1, 2], "packages": "some 1.0"}
BANDWIDTH = {"median": 10.0, "best": 12.0}


def outcome(**engines: dict) -> Outcome:
    """Return an outcome with the samples above, and other samples for the given engines."""
    samples = {name.replace("_", "."): SAMPLES | found for name, found in engines.items()}
    return Outcome(samples, {name: dict(ENGINE) for name in samples}, [BANDWIDTH, BANDWIDTH])


def rows(text: str) -> dict[tuple[str, str], list[str]]:
    """Return the table's cells by (case, precision), with its heading under ("case", "precision")."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {(case, precision): rest for case, precision, *rest in cells if case != "---"}


# -- arithmetic


def test_decode_step_is_the_time_of_64_more_tokens_over_64():
    asked = []

    def seconds(batch: int, length: int, tokens: int) -> float:
        asked.append((batch, length, tokens))
        return 0.5 + 0.01 * (tokens - 1)

    found = {case: sample(seconds) for case, sample in cases([1, 8], CaseLengths()).items()}
    assert found == pytest.approx({"decode_1": 10.0, "decode_8": 10.0, "prefill": 2048 / 0.5})
    assert asked == [(1, 32, 65), (1, 32, 1), (8, 32, 65), (8, 32, 1), (4, 512, 1)]


def test_context_sets_the_length_of_all_prompts():
    asked = []
    for sample in cases([1], CaseLengths.of(2048)).values():
        sample(lambda *generation: asked.append(generation) or 1.0)
    assert asked == [(1, 2048, 193), (1, 2048, 1), (4, 2048, 1)]
    assert CaseLengths.of(2048).max_tokens >= 2048 + 193
    assert CaseLengths.of(None) == CaseLengths()


def test_rounds_are_combined_by_their_median():
    assert medians({"decode_1": [1.0, 9.0, 2.0]}) == {"decode_1": 2.0}


def test_peer_ratio_compares_turns_of_the_same_round():
    ours, theirs = {"decode_1": [1.0, 30.0, 3.0, 4.0]}, {"decode_1": [2.0, 60.0, 3.0], "prefill": [1.0]}
    assert ratios(ours, theirs) == {"decode_1": 0.5}, "of 0.5, 0.5, 1; the fourth turn of one was not the other's"
    assert ratios({"prefill": [100.0]}, {"prefill": [50.0]}) == {"prefill": 0.5}, "twice the rate is half the time"


def test_share_is_relative_to_the_bandwidth_around_the_step():
    around = [{"median": rate, "best": 99.0} for rate in (8.0, 12.0, 4.0, 6.0, 90.0)]
    shares = [50e6 / ms / 1e9 * (1 / a + 1 / b) / 2 for ms, a, b in ((8e-3, 8.0, 12.0), (20e-3, 4.0, 6.0))]
    engine = {"weights": 50.0, "token": 0.0}
    assert share([8.0, 20.0], engine, around, CaseLengths()) == pytest.approx(sum(shares) / 2)
    engine["token"] = 0.1  # MB for each of 200 tokens, and of half of the 100 that come to them
    assert share([8.0, 20.0], engine, around, CaseLengths(200, 200, 100)) == pytest.approx(sum(shares) / 2 * 75 / 50)


def test_token_bytes_count_keys_and_values_of_all_layers(tmp_path):
    shape = {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert token_bytes(tmp_path) == 3 * 2 * 2 * 64 * 2


@pytest.mark.parametrize(("steps", "bandwidths"), [([], [BANDWIDTH] * 2), ([8.0], []), ([8.0], [BANDWIDTH])])
def test_share_without_bandwidth_or_step_is_none(steps, bandwidths):
    assert share(steps, ENGINE, bandwidths, CaseLengths()) is None


# -- the table


def test_peers_table_has_a_row_for_each_case_and_precision():
    bf16 = outcome(jaxserve={}, transformers={"decode_1": [16.0], "prefill": [2000.0]})
    int4 = outcome(jaxserve={"decode_1": [4.0]}, llama_cpp={"decode_1": [2.0]})
    found = rows(
        table("160m", {"bf16": summary(bf16, CaseLengths()), "int4": summary(int4, CaseLengths())}, CaseLengths())
    )
    assert found["case", "precision"][:4] == ["jaxserve", "of bandwidth", "transformers", "llama.cpp"]
    step = "decode step, batch 1, ms"
    assert found[step, "bf16"] == [
        "8.0", "62 %", "16.0 (0.50x)", "-", "8.1 (0.99x)", "6.4 (1.25x)", "16.8 (0.48x)",
    ]  # fmt: skip
    assert found[step, "int4"] == ["4.0", "125 %", "-", "2.0 (2.00x)", "-", "2.4 (1.67x)", "-"]
    assert found["decode step, batch 8, ms", "int4"][1] == "-", "only a single sequence is bound by the weights"
    assert found["prefill 4 x 512, tokens/s", "bf16"][2] == "2000 (2.00x)", "a ratio of times, also of a rate"
    assert found["weights read per step, MB", "bf16"][2] == "50 (1.00x)"
    assert len(found) == 1 + 2 * (len(SAMPLES) + 2)


def test_reported_figures_are_shown_for_default_lengths_alone():
    longer = CaseLengths.of(2048)
    found = rows(table("160m", {"int4": summary(outcome(jaxserve={}), longer)}, longer))
    assert found["case", "precision"] == ["jaxserve", "of bandwidth"]
    assert {"decode step after 2048, batch 1, ms", "prefill 4 x 2048, tokens/s"} <= {case for case, _ in found}


def test_peers_table_shows_the_ratio_of_rounds():
    drifting = outcome(jaxserve={"decode_1": [10.0, 20.0, 40.0]}, llama_cpp={"decode_1": [40.0, 80.0, 20.0]})
    found = rows(table("160m", {"int4": summary(drifting, CaseLengths())}, CaseLengths()))
    assert found["decode step, batch 1, ms", "int4"][2] == "40.0 (0.25x)", "of 0.25, 0.25 and 2"


def test_peers_table_shows_skipped_engines_and_agreement():
    found = outcome(jaxserve={}, llama_cpp={})
    found.engines["jaxserve"]["first_tokens"], found.engines["llama.cpp"]["first_tokens"] = [1, 2, 3], [1, 0, 3]
    found.skipped["transformers"] = "not installed: torch"
    text = table("unheard-of", {"bf16": summary(found, CaseLengths())}, CaseLengths())
    assert "- bf16: memory is read at 10.0 GB/s (best pass 12.0)" in text
    assert "- bf16: transformers: skipped: not installed: torch" in text
    assert "- bf16: first tokens equal to jaxserve's: llama.cpp 2 of 3" in text


def test_peers_table_without_figures_is_a_heading():
    assert set(rows(table("160m", {}, CaseLengths()))) == {("case", "precision")}


# -- options


def test_default_engines_have_one_of_the_precisions():
    assert parse([]).engines == ("jaxserve", "transformers", "llama.cpp")
    assert parse([]).precisions == ("bf16",)
    assert parse(["--precisions", "int4", "int8", "int4"]).precisions == ("int4", "int8")
    assert parse(["--precisions", "int8", "int4"]).engines == ("jaxserve", "llama.cpp")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precisions", "int8", "--engines", "transformers"], "transformers, which supports bf16 alone"),
        (["--precisions", "fp4"], "invalid choice: 'fp4'"),
        (["--rounds", "0"], "0 is not above 0"),
        (["--batches", "1", "x"], "invalid positive value: 'x'"),
        (["--models", "70b"], "invalid choice: '70b'"),
    ],
)
def test_invalid_peers_options_are_errors(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        parse(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


# -- workers


def test_bandwidth_is_measured_before_and_after_jaxserve():
    assert turns_of(["transformers", "jaxserve"]) == ["transformers", "bandwidth", "jaxserve", "bandwidth"]
    assert turns_of(["transformers", "llama.cpp"]) == ["transformers", "llama.cpp"]


@contextmanager
def worker(*arguments: str) -> Iterator[Worker]:
    found = Worker([sys.executable, *arguments])
    try:
        yield found
    finally:
        found.kill()


def test_a_worker_answers_each_question_with_a_line():
    with worker("-c", "import sys\nprint('{}', flush=True)\nfor line in sys.stdin: print(line, flush=True)") as echo:
        assert echo.answer() == {}
        assert echo.ask({"seconds": 2}) == {"seconds": 2}


@pytest.mark.parametrize(
    ("program", "message"),
    [("raise SystemExit(3)", "with status 3"), ("import os; os.kill(os.getpid(), 11)", "SIGSEGV")],
)
def test_failed_worker_reports_how_it_ended(program, message):
    with worker("-c", program) as failing, pytest.raises(WorkerFailed, match=message):
        failing.ask(1)


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is not None, reason="llama.cpp is installed")
def test_worker_of_a_missing_engine_names_the_package(tmp_path):
    command = ["-m", "bench.peers.worker", "llama.cpp", str(tmp_path), "bf16"]
    limits = ["--threads", "1", "--batches", "1", "--longest", "9"]
    with worker(*command, *limits) as missing:
        assert "llama_cpp" in missing.answer()["skipped"]


FAKE_PEER = f"""#!{sys.executable}
import json, os, pathlib, sys, time
_, _, _, engine, model, precision, *_ = sys.argv
folder = pathlib.Path(__file__).parent
calls = folder / "calls"
print(json.dumps({{"first_tokens": [1], "packages": "", "weights": 1.0, "token": 0.0}}), flush=True)
for line in sys.stdin:
    batch, length, tokens = json.loads(line)
    number = len(calls.read_text().split()) if calls.exists() else 0
    with calls.open("a") as file:
        file.write(engine + " ")
    if number == int((folder / "stop").read_text()):
        if (folder / "fails").exists():
            raise SystemExit(7)
        (folder / "pid").write_text(str(os.getpid()))
        time.sleep(90)
    seconds = 1.0 if length == 512 else 0.064 * (10 + number) if tokens > 1 else 0.0
    print(json.dumps({{"seconds": seconds, "memory": 1.0}}), flush=True)
"""


@pytest.fixture
def peers(tmp_path: Path) -> Path:
    """Return a folder with an interpreter `python` that answers as workers do, up to question number `stop`."""
    python = tmp_path / "python"
    python.write_text(FAKE_PEER)
    python.chmod(0o755)
    model = tmp_path / "cache" / "llama-160m"
    model.mkdir(parents=True)
    (model / "model.safetensors.index.json").write_text("{}")  # so that no checkpoint is written
    return tmp_path


def command(peers: Path) -> list[str]:
    return [
        sys.executable, "-m", "bench.peers", "--models", "160m", "--batches", "1",
        "--engines", "transformers", "llama.cpp",
        "--peer-python", str(peers / "python"), "--cache-dir", str(peers / "cache"), "--out", str(peers / "out.json"),
    ]  # fmt: skip


def within(seconds: float, condition) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(condition())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("ignored", [False, True], ids=["", "SIGINT ignored"])
def test_signal_ends_the_peers_with_the_finished_rounds(peers, number, ignored):
    (peers / "stop").write_text("10")  # llama.cpp's second round
    shell = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"] if ignored else []
    process = subprocess.Popen(
        [*shell, *command(peers)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert within(60, lambda: (peers / "pid").exists() and (peers / "pid").read_text())
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert rows(output)["decode step, batch 1, ms", "bf16"][2:4] == ["16.0", "16.0"], "medians of 14, 18 and of 16"
    measured = json.loads((peers / "out.json").read_text())["models"]["160m"]["bf16"]["samples"]
    assert measured["transformers"]["decode_1"] == pytest.approx([14, 18])
    assert measured["llama.cpp"]["decode_1"] == pytest.approx([16])
    with pytest.raises(ProcessLookupError):  # its worker is gone too
        os.kill(int((peers / "pid").read_text()), 0)


def test_failed_worker_does_not_affect_other_engines(peers):
    (peers / "stop").write_text("6")
    (peers / "fails").touch()
    done = subprocess.run([*command(peers), "--rounds", "2"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "- bf16: llama.cpp: skipped: its process ended with status 7" in done.stdout
    asked = (peers / "calls").read_text().split()
    once, first, second, prefill = (
        ["transformers"] * 2,
        ["transformers"] * 2,
        ["transformers"] * 2,
        ["transformers"] * 3,
    )
    assert asked == [*once, "llama.cpp", "llama.cpp", *first, "llama.cpp", *second, *prefill]
    assert rows(done.stdout)["decode step, batch 1, ms", "bf16"][2] == "15.5", "of 14 and 17"
