"""The engines in turn, each in a process of its own, and the memory's bandwidth beside them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.engines import PRECISIONS

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("transformers", "llama.cpp")
OURS = "jaxserve"


@dataclass(frozen=True)
class Settings:
    """What is measured, and how often."""

    engines: tuple[str, ...]
    batches: tuple[int, ...]
    threads: int
    rounds: int
    repeats: int
    peer_python: str  # an interpreter that has the peers


@dataclass
class Outcome:
    """One model in one precision: the workers' answers by engine, the bandwidths. Filled in meanwhile."""

    rounds: dict[str, list[dict]] = field(default_factory=dict)
    bandwidth: list[dict[str, float]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # engine, or "bandwidth": why
    failed: bool = False


class WorkerFailed(Exception):
    """A worker's process ended without an answer."""


def measure_in_turn(
    settings: Settings, model: Path, precision: str, outcome: Outcome, on_answer: Callable[[], None]
) -> None:
    """Every engine once, and again, `rounds` times over, so that a drift of the machine meets all of them alike.

    Fills `outcome`, also when it is interrupted; `on_answer` is called after each turn. Mutates.
    """
    turns = turns_of(name for name in settings.engines if precision in PRECISIONS[name])
    for number in range(1, settings.rounds + 1):
        for name in turns:
            if name in outcome.skipped:
                continue
            print(f"{model.name}, {precision}: round {number}/{settings.rounds}: {name}", file=sys.stderr, flush=True)
            _take_turn(settings, model, precision, name, outcome)
            on_answer()


def turns_of(engines: Iterable[str]) -> list[str]:
    """A round: the engines, with the bandwidth before and after jaxserve, whose share of it is told."""
    return [turn for name in engines for turn in (("bandwidth", name, "bandwidth") if name == OURS else (name,))]


def _take_turn(settings: Settings, model: Path, precision: str, name: str, outcome: Outcome) -> None:
    try:
        answer = answer_of(_command(settings, model, precision, name))
    except WorkerFailed as error:
        outcome.skipped[name], outcome.failed = str(error), True
        return
    if "skipped" in answer:
        outcome.skipped[name] = answer["skipped"]
    elif name == "bandwidth":
        outcome.bandwidth.append(answer)
    else:
        outcome.rounds.setdefault(name, []).append(answer)


def _command(settings: Settings, model: Path, precision: str, name: str) -> list[str]:
    threads = ["--threads", str(settings.threads)]
    if name == "bandwidth":
        return [sys.executable, "-m", "bench.bandwidth", "--json", *threads]
    python = settings.peer_python if name in PEERS else sys.executable
    command = [python, "-m", "bench.peers.worker", name, str(model), precision, *threads]
    return [*command, "--repeats", str(settings.repeats), "--batches", *map(str, settings.batches)]


def answer_of(command: Sequence[str]) -> dict:
    """The last line that a program prints, as JSON; its standard error passes through.

    It gets a session of its own: Ctrl-C reaches it only through this process, which ends it with all that it started.
    Raises `WorkerFailed`.
    """
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, _ = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode != 0:
        raise WorkerFailed(f"its process {_end(process.returncode)}")
    return json.loads(output.splitlines()[-1])


def _end(status: int) -> str:
    """How a process ended; a negative status is a signal's number."""
    return f"ended with status {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"
