"""Running the parts in turn, each in its own process with a time limit.

A part that crashes, hangs or runs out of memory affects no other part. The device's memory is free for the next part,
and what was measured until then is kept.
"""

import collections
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu_parts import Row, turns

ROOT = Path(__file__).resolve().parents[2]
MIN_SECONDS = 10.0  # a part with less time is not started
TAIL = 15  # lines of a failed part's output that are kept


@dataclass(frozen=True)
class Part:
    """A part's name for the worker, and its seconds; time that earlier parts leave over is added to them."""

    name: str
    seconds: float
    is_peer: bool = False  # whether it runs in the peer's interpreter

    @property
    def kind(self) -> str:
        """The name without that of a model or precision."""
        return self.name.partition(":")[0]


# Parts with targets come first. Together they take 465 seconds.
DEFAULT_PARTS = (
    Part("ceilings", 25),
    Part("kernels", 120),
    Part("engine:8b", 160),
    Part("checkpoint", 30),
    Part("engine:1b", 50),
    Part("peer:1b", 40, is_peer=True),
    Part("peer:8b", 40, is_peer=True),
)
# These answer single questions, and run when they are asked for.
PARTS = (
    *DEFAULT_PARTS,
    Part("samplers", 30),
    Part("products:int4", 30),
    Part("products:int8", 30),
    Part("products:bf16", 30),
    Part("steps:8b", 120),
    Part("bursts:8b", 130),
    Part("transitions:8b", 120),
    Part("threads:1b", 40),
)


@dataclass
class Outcome:
    """The outcome of a part, filled in while it runs."""

    status: str = "not started"  # then running; finally ok, skipped, failed, crashed, out of time or interrupted
    why: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    """The settings of the workers."""

    device: str  # cuda or cpu
    tiny: bool
    cache: Path
    python: str
    peer_python: str

    def command(self, part: Part) -> list[str]:
        """Return the worker's command line."""
        python = self.peer_python if part.is_peer else self.python
        command = [python, "-m", "bench.gpu_parts.worker", part.name, "--device", self.device]
        return [*command, "--cache-dir", str(self.cache), *(["--tiny"] if self.tiny else [])]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the workers: JAX uses the chosen device or fails, and nothing uses the network."""
        compiled = self.cache / "xla"
        compiled.mkdir(parents=True, exist_ok=True)
        return {
            **os.environ,
            "JAX_PLATFORMS": self.device,
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }


def run_parts(
    parts: Sequence[Part], settings: Settings, outcomes: dict[str, Outcome], on_change: Callable[[str], None]
) -> None:
    """Run the parts in order within the sum of their seconds, filling `outcomes` by name.

    `on_change` is called with a part's name whenever its outcome changes.
    """
    deadline = time.monotonic() + sum(part.seconds for part in parts)
    for index, part in enumerate(parts):
        outcome = outcomes[part.name] = Outcome()
        later = sum(other.seconds for other in parts[index + 1 :])
        limit = deadline - time.monotonic() - later
        if limit < MIN_SECONDS:
            outcome.why = "no time was left"
            continue
        start = time.monotonic()
        try:
            run_part(settings.command(part), settings.environment, limit, outcome, partial(on_change, part.name))
        finally:
            outcome.seconds = round(time.monotonic() - start, 1)
            on_change(part.name)


def run_in_turns(
    parts: Sequence[Part], settings: Settings, outcomes: dict[str, Outcome], on_change: Callable[[str], None]
) -> None:
    """Start all parts together, and give each the device for its seconds when it is ready to measure.

    The first part in order that is ready has the next turn. The first turn begins when all parts are ready, since
    others' compiling would disturb it, or at half of the time. All ends after the sum of the parts' seconds.
    """
    seconds_in_all = sum(part.seconds for part in parts)
    deadline = time.monotonic() + seconds_in_all
    half = deadline - seconds_in_all / 2
    outcomes.update((part.name, Outcome()) for part in parts)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as all_workers:
        environment = {**settings.environment, turns.FOLDER: folder, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        waiting: dict[str, tuple[_Worker, contextlib.ExitStack, float]] = {}
        for part in parts:
            one_worker = all_workers.enter_context(contextlib.ExitStack())
            waiting[part.name] = _Worker(settings.command(part), environment, one_worker), one_worker, part.seconds
        while waiting and time.monotonic() < deadline:
            ready = [name for name, (worker, *_) in waiting.items() if worker.is_ready(Path(folder))]
            if not ready or (len(ready) < len(waiting) and time.monotonic() < half):
                time.sleep(turns.LOOK_S)
                continue
            name = ready[0]
            worker, one_worker, seconds = waiting.pop(name)
            turns.turn(Path(folder), worker.process.pid).touch()
            start, limit = time.monotonic(), min(seconds, deadline - time.monotonic())
            try:
                worker.follow(limit, outcomes[name], partial(on_change, name))
            finally:
                one_worker.close()
                outcomes[name].seconds = round(time.monotonic() - start, 1)
                on_change(name)
        for name in waiting:
            outcomes[name].why = "no time was left, or it was not ready"
            on_change(name)


def run_part(
    command: Sequence[str], environment: dict[str, str], limit: float, outcome: Outcome, on_row: Callable[[], None]
) -> None:
    """Run one worker for at most `limit` seconds. KeyboardInterrupt ends it and is raised again."""
    with contextlib.ExitStack() as stack:
        _Worker(command, environment, stack).follow(limit, outcome, on_row)


class _Worker:
    """The process of a part, and what it has written."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], stack: contextlib.ExitStack):
        """Start the process, which ends when `stack` is closed."""
        self._log = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115, closed by the stack
        self.process = stack.enter_context(_process(command, environment, self._log))
        self._messages = _lines(self.process)

    def is_ready(self, folder: Path) -> bool:
        """Return whether the process waits for its turn, or has ended."""
        return turns.ready(folder, self.process.pid).exists() or self.process.poll() is not None

    def follow(self, limit: float, outcome: Outcome, on_row: Callable[[], None]) -> None:
        """Fill the outcome for at most `limit` seconds. KeyboardInterrupt is raised again."""
        outcome.status = "running"
        deadline = time.monotonic() + limit
        try:
            while (line := self._messages.get(timeout=max(deadline - time.monotonic(), 0))) is not None:
                message = json.loads(line)
                if "row" in message:
                    outcome.rows.append(message["row"])
                    on_row()
                else:
                    outcome.status, outcome.why = message["end"], message.get("why", "")
        except queue.Empty:
            outcome.status, outcome.why = "out of time", f"ended after {limit:.0f} s"
        except KeyboardInterrupt:
            outcome.status = "interrupted"
            raise
        if outcome.status == "running":
            outcome.status, outcome.why = "crashed", f"exit status {self.process.wait()}: {_tail(self._log)}"


@contextlib.contextmanager
def _process(command: Sequence[str], environment: dict[str, str], log: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process in its own session, and kill it with all its children if it has not ended."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)  # after its last message it ends soon
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _lines(process: subprocess.Popen[str]) -> "queue.Queue[str | None]":
    """Return a queue of the process's output lines as they arrive, followed by None."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _tail(log: Any) -> str:
    log.seek(0)
    return "".join(collections.deque(log, TAIL))


def default_settings(device: str, *, tiny: bool, cache: Path, peer_python: str | None) -> Settings:
    """Return settings with workers in this interpreter, unless the peer has its own."""
    return Settings(device, tiny, cache, sys.executable, peer_python or sys.executable)
