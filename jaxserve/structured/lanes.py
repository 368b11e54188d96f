"""Two lanes in which new grammars are tried: one for short trials, and one for those that take longer.

A grammar begins in the short lane. If its trial does not end there within a slice of time, it goes on to the long one,
whose processes have a lower priority. Thus a grammar that compiles fast waits for at most one slice of each other
client, whatever these clients send. Nothing waits for the long lane but what is long itself, and there each client has
one process at a time, so that a long grammar waits for its own client alone while there are processes left.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from jaxserve.core.errors import QueueFull
from jaxserve.core.structured import StructuredOutput
from jaxserve.structured.trial import CPU_SECONDS, Trials
from jaxserve.structured.turns import Turns, TurnsFull

Result = TypeVar("Result")
SLICE_SECONDS = 0.2  # of CPU time in the short lane
NICENESS = 10  # of the long lane's processes
LONG_PROCESSES = 3  # each starts when it is first needed
# Waiting grammars of all clients, as many as the engine's queue has room for by default, and of one client.
MAX_SHORT, MAX_SHORT_OF_CLIENT = 1024, 256
MAX_LONG, MAX_LONG_OF_CLIENT = 64, 16
RETRY_AFTER = 2.0  # seconds


class Unfinished(Exception):
    """Raised by a trial that has not ended within its time."""


@dataclass(eq=False)
class Job(Generic[Result]):
    """A grammar that waits to be compiled for a client."""

    client: str
    structured: StructuredOutput
    future: Future[Result] = field(default_factory=Future)


Compile = Callable[[StructuredOutput, Trials, float], Result]


class Lanes(Generic[Result]):
    """Compiles grammars in turns between clients. Thread-safe."""

    def __init__(self, trials: Callable[[int], Trials], compile: Compile[Result]):
        """`trials` returns a process of a niceness, and `compile` uses it for at most some seconds of its CPU time.

        `compile` raises `Unfinished` if that does not suffice.
        """
        several = [trials(NICENESS) for _ in range(LONG_PROCESSES)]
        self._first = trials(0)
        self._long = _Lane(several, compile, CPU_SECONDS, Turns(MAX_LONG, MAX_LONG_OF_CLIENT), None)
        short = Turns[Job[Result]](MAX_SHORT, MAX_SHORT_OF_CLIENT)
        self._short = _Lane([self._first], compile, SLICE_SECONDS, short, self._long)

    def start(self) -> None:
        """Start the process of the short lane, so that the first grammar need not wait for it."""
        self._first.start()

    def submit(self, structured: StructuredOutput, client: str) -> Future[Result]:
        """Return the future of a compiled grammar. Cancelling it gives the place in the queue to others.

        `client`: whose turn it is; "": nobody else's. Raise `QueueFull` if too much is waiting.
        """
        job: Job[Result] = Job(client, structured)
        if not client:
            job.client = f"request {id(job)}"
        self._short.add(job)
        return job.future


class _Lane(Generic[Result]):
    """A queue with a thread for each process that works on it as long as there is something for it to do.

    No two threads work for the same client.
    """

    def __init__(
        self,
        trials: Sequence[Trials],
        compile: Compile[Result],
        seconds: float,
        turns: Turns[Job[Result]],
        following: "_Lane[Result] | None",
    ):
        self._idle, self._compile, self._seconds = list(trials), compile, seconds
        self._turns, self._following = turns, following
        self._lock = threading.Lock()
        self._served: set[str] = set()  # the clients for which a thread works

    def add(self, job: Job[Result]) -> None:
        with self._lock:
            try:
                self._turns.add(job.client, len(job.structured.text), job)
            except TurnsFull as full:
                raise QueueFull(
                    f"{job.structured.name} cannot be compiled now: {full}, which is the limit",
                    field=job.structured.name,
                    limit=full.limit,
                    retry_after=RETRY_AFTER,
                ) from None
            trials = self._idle.pop() if self._idle else None
        job.future.add_done_callback(lambda future: self._forget(job) if future.cancelled() else None)
        if trials is not None:
            threading.Thread(target=self._work, args=(trials,), name="jaxserve-grammars", daemon=True).start()

    def _forget(self, job: Job[Result]) -> None:
        with self._lock:
            self._turns.remove(job.client, job)

    def _work(self, trials: Trials) -> None:
        while job := self._next(trials):
            self._run(job, trials)
            with self._lock:
                self._served.remove(job.client)

    def _next(self, trials: Trials) -> Job[Result] | None:
        with self._lock:
            job = self._turns.take(self._served)
            if job is None:
                self._idle.append(trials)
            else:
                self._served.add(job.client)
            return job

    def _run(self, job: Job[Result], trials: Trials) -> None:
        """Complete a job, or give it to the following lane. It can be cancelled as long as it waits for that."""
        if job.future.cancelled():
            return
        try:
            result = self._compile(job.structured, trials, self._seconds)
        except Unfinished:
            assert self._following is not None
            try:
                self._following.add(job)
            except QueueFull as error:
                _complete(job.future, error=error)
        except BaseException as error:
            _complete(job.future, error=error)
        else:
            _complete(job.future, result)


def _complete(future: Future, result: object = None, error: BaseException | None = None) -> None:
    """Complete a future unless it has been cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
