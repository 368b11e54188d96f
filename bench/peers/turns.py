"""Engines that take turns, each loaded in its own process, and the memory bandwidth measured in between."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.engines import PRECISIONS
from bench.peers.worker import BANDWIDTH
from bench.peers.workload import CaseLengths, cases

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("transformers", "llama.cpp")
OURS = "jaxserve"
MEMORY_BOUND = "decode_1"  # the case whose share of the bandwidth is reported


@dataclass(frozen=True)
class Settings:
    """The engines, cases and number of rounds to measure."""

    engines: tuple[str, ...]
    batches: tuple[int, ...]
    lengths: CaseLengths
    threads: int
    rounds: int
    peer_python: str  # an interpreter with the peers


@dataclass
class Outcome:
    """The outcome of one model in one precision, filled in while it is measured.

    `samples` has one entry per round, by engine and case. `engines` holds the facts that each engine reported.
    `bandwidths` were measured before and after each sample of the case that is bound by memory.
    """

    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    bandwidths: list[dict[str, float]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # {engine or "bandwidth": reason}
    failed: bool = False

    def record(self, name: str, case: str, sample: Any) -> None:
        """Add the measurement of one turn."""
        if name == BANDWIDTH:
            self.bandwidths.append(sample)
        else:
            self.samples.setdefault(name, {}).setdefault(case, []).append(sample)


class WorkerFailed(Exception):
    """A worker's process ended without an answer."""


class Worker:
    """A process that has loaded an engine and answers lines of JSON with lines of JSON.

    What it prints to its standard error passes through. It has its own session, so Ctrl-C reaches only this process,
    which then kills the worker with all its children.
    """

    def __init__(self, command: Sequence[str]):
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, bufsize=1, start_new_session=True
        )

    def ask(self, question: Any) -> dict[str, Any]:
        """Return the answer to a question. Raise WorkerFailed."""
        with suppress(BrokenPipeError):  # a worker that is gone gives no answer either
            print(json.dumps(question), file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Return the next answer; the first one needs no question. Raise WorkerFailed."""
        line = self._process.stdout.readline()
        if not line:
            raise WorkerFailed(f"its process {_end(self._process.wait())}")
        return json.loads(line)

    def kill(self) -> None:
        """Kill the process with all its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()


def measure_in_turn(
    settings: Settings, model: Path, precision: str, outcome: Outcome, on_round: Callable[[], None]
) -> None:
    """Load every engine and measure each case by each of them in turn, `rounds` times.

    Turns make a change of the machine's speed affect all engines alike. Before the first round each engine runs the
    case once unmeasured. `outcome` is filled also if the call is interrupted. `on_round` is called after each round.
    """
    turns = turns_of(name for name in settings.engines if precision in PRECISIONS[name])
    with ExitStack() as ends:
        workers: dict[str, Worker] = {}
        for name in dict.fromkeys(turns):
            _log(f"{model.name}, {precision}: loading {name}")
            workers[name] = Worker(_command(settings, model, precision, name))
            ends.callback(workers[name].kill)
            with _skipped_on_failure(name, outcome):
                _record_engine(name, workers[name].answer(), outcome)
        for case, sample in cases(settings.batches, settings.lengths).items():
            for number in range(settings.rounds + 1):
                _log(f"{model.name}, {precision}: {case}: {f'round {number}/{settings.rounds}' if number else 'once'}")
                for name in turns:
                    if name in outcome.skipped or (name == BANDWIDTH and case != MEMORY_BOUND):
                        continue
                    with _skipped_on_failure(name, outcome):
                        found = _sample(name, workers[name], sample, outcome)
                        if number:
                            outcome.record(name, case, found)
                on_round()


def turns_of(engines: Iterable[str]) -> list[str]:
    """Return the order of a round: all engines, with the bandwidth measured before and after jaxserve."""
    return [turn for name in engines for turn in ((BANDWIDTH, name, BANDWIDTH) if name == OURS else (name,))]


def _record_engine(name: str, facts: dict[str, Any], outcome: Outcome) -> None:
    if "skipped" in facts:
        outcome.skipped[name] = facts["skipped"]
    elif name != BANDWIDTH:
        outcome.engines[name] = facts


def _sample(name: str, worker: Worker, sample: Callable, outcome: Outcome) -> Any:
    if name == BANDWIDTH:
        return worker.ask(None)

    def seconds(*generation: int) -> float:
        answer = worker.ask(generation)
        outcome.engines[name]["memory"] = answer["memory"]
        return answer["seconds"]

    return sample(seconds)


@contextmanager
def _skipped_on_failure(name: str, outcome: Outcome) -> Iterator[None]:
    """Skip an engine from its first failure on."""
    try:
        yield
    except WorkerFailed as error:
        outcome.skipped[name], outcome.failed = str(error), True


def _command(settings: Settings, model: Path, precision: str, name: str) -> list[str]:
    python = settings.peer_python if name in PEERS else sys.executable
    command = [python, "-m", "bench.peers.worker", name, str(model), precision]
    limits = ["--threads", settings.threads, "--longest", settings.lengths.max_tokens, "--batches", *settings.batches]
    return [*command, *map(str, limits)]


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _end(status: int) -> str:
    """Describe how a process ended; a negative status is a signal's number."""
    return f"ended with status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
