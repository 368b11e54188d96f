"""The engines in turn, each loaded in a process of its own, and the memory's bandwidth beside them."""

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
from bench.peers.workload import Lengths, cases

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("transformers", "llama.cpp")
OURS = "jaxserve"
MEMORY_BOUND = "decode_1"  # the case whose share of the bandwidth is told


@dataclass(frozen=True)
class Settings:
    """What is measured, and how often."""

    engines: tuple[str, ...]
    batches: tuple[int, ...]
    lengths: Lengths
    threads: int
    rounds: int
    peer_python: str  # an interpreter that has the peers


@dataclass
class Outcome:
    """One model in one precision. Filled in meanwhile.

    `samples` by engine and case, one of each round; `engines`: what each said of itself; `bandwidths`: around each
    sample of the case that is bound by memory, before and after.
    """

    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    bandwidths: list[dict[str, float]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # engine, or "bandwidth": why
    failed: bool = False

    def record(self, name: str, case: str, sample: Any) -> None:
        """Adds what was measured in a turn. Mutates."""
        if name == BANDWIDTH:
            self.bandwidths.append(sample)
        else:
            self.samples.setdefault(name, {}).setdefault(case, []).append(sample)


class WorkerFailed(Exception):
    """A worker's process ended without an answer."""


class Worker:
    """A process that has loaded an engine and answers lines of JSON with lines of JSON; what it prints to its standard
    error passes through.

    It has a session of its own: Ctrl-C reaches it only through this process, which ends it with all that it started.
    """

    def __init__(self, command: Sequence[str]):
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, bufsize=1, start_new_session=True
        )

    def ask(self, question: Any) -> dict[str, Any]:
        """The answer to a question. Raises `WorkerFailed`."""
        with suppress(BrokenPipeError):  # there is no answer either
            print(json.dumps(question), file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next answer; the first one needs no question. Raises `WorkerFailed`."""
        line = self._process.stdout.readline()
        if not line:
            raise WorkerFailed(f"its process {_end(self._process.wait())}")
        return json.loads(line)

    def kill(self) -> None:
        """Ends it with all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()


def measure_in_turn(
    settings: Settings, model: Path, precision: str, outcome: Outcome, on_round: Callable[[], None]
) -> None:
    """Loads every engine; then each case by each of them, `rounds` times in turn, so that a change of the machine meets
    all alike. Before the first round each does it once unmeasured.

    Fills `outcome`, also when it is interrupted; `on_round` is called after each round. Mutates.
    """
    turns = turns_of(name for name in settings.engines if precision in PRECISIONS[name])
    with ExitStack() as ends:
        workers: dict[str, Worker] = {}
        for name in dict.fromkeys(turns):
            _say(f"{model.name}, {precision}: loading {name}")
            workers[name] = Worker(_command(settings, model, precision, name))
            ends.callback(workers[name].kill)
            with _told(name, outcome):
                _introduce(name, workers[name].answer(), outcome)
        for case, sample in cases(settings.batches, settings.lengths).items():
            for number in range(settings.rounds + 1):
                _say(f"{model.name}, {precision}: {case}: {f'round {number}/{settings.rounds}' if number else 'once'}")
                for name in turns:
                    if name in outcome.skipped or (name == BANDWIDTH and case != MEMORY_BOUND):
                        continue
                    with _told(name, outcome):
                        found = _sample(name, workers[name], sample, outcome)
                        if number:
                            outcome.record(name, case, found)
                on_round()


def turns_of(engines: Iterable[str]) -> list[str]:
    """A round: the engines, with the bandwidth before and after jaxserve, whose share of it is told."""
    return [turn for name in engines for turn in ((BANDWIDTH, name, BANDWIDTH) if name == OURS else (name,))]


def _introduce(name: str, told: dict[str, Any], outcome: Outcome) -> None:
    if "skipped" in told:
        outcome.skipped[name] = told["skipped"]
    elif name != BANDWIDTH:
        outcome.engines[name] = told


def _sample(name: str, worker: Worker, sample: Callable, outcome: Outcome) -> Any:
    if name == BANDWIDTH:
        return worker.ask(None)

    def seconds(*generation: int) -> float:
        told = worker.ask(generation)
        outcome.engines[name]["memory"] = told["memory"]
        return told["seconds"]

    return sample(seconds)


@contextmanager
def _told(name: str, outcome: Outcome) -> Iterator[None]:
    """An engine that fails is left out from then on."""
    try:
        yield
    except WorkerFailed as error:
        outcome.skipped[name], outcome.failed = str(error), True


def _command(settings: Settings, model: Path, precision: str, name: str) -> list[str]:
    python = settings.peer_python if name in PEERS else sys.executable
    command = [python, "-m", "bench.peers.worker", name, str(model), precision]
    limits = ["--threads", settings.threads, "--longest", settings.lengths.longest, "--batches", *settings.batches]
    return [*command, *map(str, limits)]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _end(status: int) -> str:
    """How a process ended; a negative status is a signal's number."""
    return f"ended with status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
