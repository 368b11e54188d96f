"""bench.peers: options, arithmetic, the table, and what becomes of a run that is ended or whose worker fails."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.peers.__main__ import parse
from bench.peers.report import combine, share, summary, table
from bench.peers.turns import Outcome, WorkerFailed, answer_of, turns_of

ROOT = Path(__file__).resolve().parents[2]
CASES = {"decode_1": 8.0, "decode_8": 16.0, "prefill": 1000.0, "weights": 50.0, "memory": 1.0}
BANDWIDTH = {"median": 10.0, "best": 12.0}


def answer(tokens: tuple[int, ...] = (1, 2), **results: float) -> dict:
    return {"results": CASES | results, "first_tokens": list(tokens), "packages": "some 1.0"}


def rows(text: str) -> dict[tuple[str, str], list[str]]:
    """The table's cells by (case, precision), and its heading under ("case", "precision")."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {(case, precision): rest for case, precision, *rest in cells if case != "---"}


# -- arithmetic


def test_rounds_are_combined_by_their_median():
    assert combine([{"decode_1": 1.0}, {"decode_1": 9.0}, {"decode_1": 2.0}]) == {"decode_1": 2.0}


def test_the_share_is_weights_over_time_over_bandwidth():
    assert share({"decode_1": 8.0, "weights": 50.0}, BANDWIDTH) == pytest.approx(50e6 / 8e-3 / 10e9)


@pytest.mark.parametrize(
    ("results", "bandwidth"), [({}, BANDWIDTH), ({"decode_8": 1.0, "weights": 1.0}, BANDWIDTH), (CASES, None)]
)
def test_there_is_no_share_without_a_bandwidth_and_a_step_of_one_sequence(results, bandwidth):
    assert share(results, bandwidth) is None


# -- the table


def test_the_table_has_a_row_for_each_case_and_precision():
    bf16 = Outcome({"jaxserve": [answer()], "transformers": [answer(decode_1=16.0, prefill=2000.0)]}, [BANDWIDTH])
    int4 = Outcome({"jaxserve": [answer(decode_1=4.0)], "llama.cpp": [answer(decode_1=2.0)]}, [BANDWIDTH])
    found = rows(table("160m", {"bf16": summary(bf16), "int4": summary(int4)}))
    assert found["case", "precision"][:4] == ["jaxserve", "of bandwidth", "transformers", "llama.cpp"]
    step = "decode step, batch 1, ms"
    assert found[step, "bf16"] == [
        "8.0", "62 %", "16.0 (0.50x)", "-", "8.1 (0.99x)", "6.4 (1.25x)", "16.8 (0.48x)",
    ]  # fmt: skip
    assert found[step, "int4"] == ["4.0", "125 %", "-", "2.0 (2.00x)", "-", "2.4 (1.67x)", "-"]
    assert found["decode step, batch 8, ms", "int4"][1] == "-", "only a single sequence is bound by the weights"
    assert found["prefill 4 x 512, tokens/s", "bf16"][2] == "2000 (2.00x)", "a ratio of times, also of a rate"
    assert len(found) == 1 + 2 * len(CASES)


def test_the_table_says_what_is_missing_and_whether_the_models_agree():
    outcome = Outcome(
        {"jaxserve": [answer((1, 2, 3))], "llama.cpp": [answer((1, 0, 3))]},
        [BANDWIDTH],
        {"transformers": "not installed: torch"},
    )
    text = table("unheard-of", {"bf16": summary(outcome)})
    assert "- bf16: memory is read at 10.0 GB/s (best pass 12.0)" in text
    assert "- bf16: transformers: skipped: not installed: torch" in text
    assert "- bf16: first tokens equal to jaxserve's: llama.cpp 2 of 3" in text


def test_a_table_of_nothing_is_a_heading():
    assert set(rows(table("160m", {}))) == {("case", "precision")}


# -- options


def test_by_default_every_engine_that_has_one_of_the_precisions_runs():
    assert parse([]).engines == ("jaxserve", "transformers", "llama.cpp")
    assert parse([]).precisions == ("bf16",)
    assert parse(["--precisions", "int4", "int8", "int4"]).precisions == ("int4", "int8")
    assert parse(["--precisions", "int8", "int4"]).engines == ("jaxserve", "llama.cpp")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--precisions", "int8", "--engines", "transformers"], "transformers, which runs in bf16 alone"),
        (["--precisions", "fp4"], "invalid choice: 'fp4'"),
        (["--rounds", "0"], "0 is not above 0"),
        (["--batches", "1", "x"], "invalid positive value: 'x'"),
        (["--models", "70b"], "invalid choice: '70b'"),
    ],
)
def test_options_that_make_no_sense_are_errors(arguments, told, capsys):
    with pytest.raises(SystemExit) as error:
        parse(arguments)
    assert error.value.code == 2
    assert told in capsys.readouterr().err


# -- workers


def test_the_bandwidth_is_measured_around_the_engine_whose_share_is_told():
    assert turns_of(["transformers", "jaxserve"]) == ["transformers", "bandwidth", "jaxserve", "bandwidth"]
    assert turns_of(["transformers", "llama.cpp"]) == ["transformers", "llama.cpp"]


def test_an_answer_is_the_last_line():
    assert answer_of([sys.executable, "-c", "print('Loading...'); print('{\"results\": {}}')"]) == {"results": {}}


@pytest.mark.parametrize(
    ("program", "told"),
    [("raise SystemExit(3)", "ended with status 3"), ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV")],
)
def test_a_worker_that_fails_says_how(program, told):
    with pytest.raises(WorkerFailed, match=told):
        answer_of([sys.executable, "-c", program])


FAKE_PEER = f"""#!{sys.executable}
import json, os, pathlib, sys, time
_, _, _, engine, model, precision, *_ = sys.argv
folder = pathlib.Path(__file__).parent
calls = folder / "calls"
number = len(calls.read_text().split()) if calls.exists() else 0
calls.open("a").write(engine + " ")
if number == int((folder / "stop").read_text()):
    if (folder / "fails").exists():
        raise SystemExit(7)
    (folder / "pid").write_text(str(os.getpid()))
    time.sleep(90)
results = {{"decode_1": 10.0 + number, "prefill": 1.0, "weights": 1.0, "memory": 1.0}}
print(json.dumps({{"results": results, "first_tokens": [1], "packages": ""}}))
"""


@pytest.fixture
def peers(tmp_path: Path) -> Path:
    """A folder with an interpreter `python` that answers as a worker would, until its call number `stop`."""
    python = tmp_path / "python"
    python.write_text(FAKE_PEER)
    python.chmod(0o755)
    model = tmp_path / "cache" / "llama-160m"
    model.mkdir(parents=True)
    (model / "model.safetensors.index.json").write_text("{}")  # so that no checkpoint is written
    return tmp_path


def command(peers: Path) -> list[str]:
    return [
        sys.executable, "-m", "bench.peers", "--models", "160m", "--engines", "transformers", "llama.cpp",
        "--peer-python", str(peers / "python"), "--cache-dir", str(peers / "cache"), "--out", str(peers / "out.json"),
    ]  # fmt: skip


def within(seconds: float, condition) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(condition())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("ignored", [False, True], ids=["", "SIGINT ignored"])
def test_a_signal_ends_it_with_the_finished_rounds(peers, number, ignored):
    (peers / "stop").write_text("3")  # llama.cpp's second round
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
    assert rows(output)["decode step, batch 1, ms", "bf16"][2:4] == ["11.0", "11.0"], "medians of 10, 12 and of 11"
    measured = json.loads((peers / "out.json").read_text())["models"]["160m"]["bf16"]["rounds"]
    assert {name: len(found) for name, found in measured.items()} == {"transformers": 2, "llama.cpp": 1}
    with pytest.raises(ProcessLookupError):  # its worker is gone too
        os.kill(int((peers / "pid").read_text()), 0)


def test_a_worker_that_fails_costs_only_its_engine(peers):
    (peers / "stop").write_text("1")
    (peers / "fails").touch()
    done = subprocess.run([*command(peers), "--rounds", "2"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "- bf16: llama.cpp: skipped: its process ended with status 7" in done.stdout
    assert (peers / "calls").read_text().split() == ["transformers", "llama.cpp", "transformers"]
    assert rows(done.stdout)["decode step, batch 1, ms", "bf16"][2] == "11.0", "of 10 and 12"
