"""A thread that drives procedures of `control`, which are generators of waits."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError as NotYet
from typing import Any

from jaxserve.control.reconfigure import Cancelled
from jaxserve.control.transitions import Sleep, Waits

CLOSING_CHECK_S = 0.2  # how often a wait for a future checks whether the thread is closing


class ProcedureThread:
    """A thread that runs procedures one after the other, and waits for whatever they yield."""

    def __init__(self, name: str, wait: Callable[[Any], Any]):
        """`wait` waits for what a procedure yields, except for `Sleep`, and returns the wait's value."""
        self.closing = threading.Event()
        self._wait_for = wait
        self._procedures: queue.SimpleQueue[Waits[None] | None] = queue.SimpleQueue()
        self._unfinished = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True while a procedure has not ended."""
        with self._lock:
            return self._unfinished > 0

    def start(self, procedure: Waits[None]) -> None:
        """Begin to run a procedure, after those that were started before, and return at once. Call from any thread."""
        with self._lock:
            self._unfinished += 1
        self._procedures.put(procedure)

    def close(self) -> None:
        """End the thread, and cut off what has not ended. May be called several times."""
        self.closing.set()
        self._procedures.put(None)
        self._thread.join()

    def result(self, future: Future) -> Any:
        """Wait for a future of another thread. Raise `Cancelled` if this thread is closed meanwhile.

        No further step runs then, so that the future may never complete.
        """
        while True:
            try:
                return future.result(CLOSING_CHECK_S)
            except NotYet:
                if self.closing.is_set():
                    raise Cancelled("the engine is closing") from None

    def _run(self) -> None:
        while (procedure := self._procedures.get()) is not None:
            self._drive(procedure)
            with self._lock:
                self._unfinished -= 1

    def _drive(self, procedure: Waits[None]) -> None:
        """Run a procedure to its end."""
        value: Any = None
        error: Exception | None = None
        while True:
            try:
                wait = procedure.send(value) if error is None else procedure.throw(error)
            except StopIteration:
                return
            value = error = None
            try:
                value = self._wait(wait)
            except Exception as failure:
                error = failure

    def _wait(self, wait: Any) -> Any:
        if isinstance(wait, Sleep):
            self.closing.wait(max(0.0, wait.until - time.monotonic()))
            return None
        return self._wait_for(wait)
