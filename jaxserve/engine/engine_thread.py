"""A thread that steps a `SyncEngine` for callers in any other thread.

Python raises KeyboardInterrupt, and exceptions of other signal handlers, in the main thread between any two
instructions. Callers only wait here, so such an exception never comes between the call of an executable, which consumes
the KV pools, and the assignment of its result.

A caller may be interrupted anywhere, because each of its actions takes effect by a single instruction: it sets a flag
of its job, or puts the job into the thread's inbox. If it is interrupted before it could close its `OutputIterator`,
that object is garbage-collected, and a weak reference puts the job into the inbox.
"""

import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from jaxserve.core.errors import EngineFailed, EngineForked, EngineStopped, JaxserveError
from jaxserve.core.request import Request, RequestOutput
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.client import Prompt
from jaxserve.engine.sync_engine import SyncEngine

PromptParams = tuple[Prompt, SamplingParams]


@dataclass(eq=False)
class _Job:
    """The requests of one call. The caller sets `wanted` and `closed`, the engine's thread all other fields."""

    waiting: deque[PromptParams]  # not yet given to the engine
    embed: bool
    stream: bool  # outputs are computed one by one, when the caller asks for the next one
    wanted: bool = True  # whether the caller waits for an output
    closed: bool = False  # whether the caller has given up
    over: bool = False  # whether `answers` is complete, except for the final None or exception
    prepared: Request | None = None  # the first request of `waiting`, tokenized
    request_ids: list[str] = field(default_factory=list)  # in the order of the call
    in_flight: set[str] = field(default_factory=set)
    answers: queue.SimpleQueue[list[RequestOutput] | BaseException | None] = field(default_factory=queue.SimpleQueue)
    caller: "weakref.ref[OutputIterator] | None" = None


# None ends the thread, (worker, None) closes the engine.
Inbox = queue.SimpleQueue["tuple[_Worker, _Job | None] | None"]


class OutputIterator:
    """An iterator over the outputs of a call's requests. It must be closed, which ends the requests still in flight.

    Iteration raises the error with which the engine refuses a request, or `EngineFailed` or `EngineStopped`. One thread
    at a time may use it.
    """

    def __init__(self, worker: "_Worker", job: _Job):
        self._worker = worker
        self._job = job
        self._pieces: deque[RequestOutput] = deque()
        # The callback runs no Python code, so that no signal interrupts it. `put` ignores its second argument.
        job.caller = weakref.ref(self, partial(worker.inbox.put, (worker, job)))

    @property
    def request_ids(self) -> list[str]:
        """The ids of the accepted requests, in order. They are complete when the iteration has ended."""
        return self._job.request_ids

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        while not self._pieces:
            answer = self._next_answer()
            if answer is None:
                raise StopIteration
            if isinstance(answer, BaseException):
                raise answer
            self._pieces.extend(answer)
        piece = self._pieces.popleft()
        if piece.error is not None:
            raise piece.error
        return piece

    def close(self) -> None:
        """End the requests still in flight, and wait until the engine has freed their pages. Idempotent."""
        job = self._job
        job.closed = True
        if self._worker.is_forked:
            return
        if not job.over:
            self._worker.inbox.put((self._worker, job))
        while not (job.over or self._worker.stopped or self._worker.is_current_thread):
            job.answers.get()

    def _next_answer(self) -> list[RequestOutput] | BaseException | None:
        if self._worker.is_forked:
            raise EngineForked
        job, over = self._job, self._job.over  # read first: if it is set, an empty queue means the end
        try:
            return job.answers.get_nowait()
        except queue.Empty:
            if over:
                return None
        job.wanted = True
        self._worker.inbox.put((self._worker, job))
        if self._worker.stopped:  # it is set before the thread reads its inbox for the last time
            raise _closed_error()
        return job.answers.get()


class EngineThread:
    """A `SyncEngine` and the thread that steps it. The engine computes only while a caller waits.

    An idle thread holds no reference to the engine. When the last other reference is dropped, the engine is freed and
    the thread ends.
    """

    def __init__(self, engine: SyncEngine):
        inbox: Inbox = queue.SimpleQueue()
        self._inbox = inbox
        self._thread = threading.Thread(target=_serve, args=(inbox,), name="jaxserve-engine", daemon=True)
        self._worker = _Worker(engine, inbox)
        weakref.finalize(self, inbox.put, None)
        self._thread.start()

    def call(self, requests: Iterable[PromptParams], *, embed: bool = False, stream: bool = False) -> OutputIterator:
        """Return an iterator that runs the requests, as many at a time as the engine's queue has room for.

        They start with the first iteration. Call from any thread.
        """
        return OutputIterator(self._worker, _Job(deque(requests), embed, stream))

    def close(self) -> None:
        """End every call in progress with `EngineStopped`, free the device and end the thread. Idempotent."""
        self._inbox.put((self._worker, None))
        self._inbox.put(None)
        self._thread.join()
        if self._worker.close_error is not None:
            raise self._worker.close_error


class _Worker:
    """The work of the thread, which alone calls the methods."""

    def __init__(self, engine: SyncEngine, inbox: Inbox):
        self.inbox = inbox
        self.stopped = False
        self.close_error: BaseException | None = None
        self._engine = engine
        self._jobs: list[_Job] = []  # jobs that are not over
        self._owners: dict[str, _Job] = {}  # by id of a request in flight
        self._failure: BaseException | None = None
        self._thread: int | None = None
        self._process = os.getpid()

    @property
    def is_forked(self) -> bool:
        """True in a fork of the process that started the thread, which the fork lacks."""
        return os.getpid() != self._process

    @property
    def is_current_thread(self) -> bool:
        """True if the caller is the engine's thread, which may collect another thread's garbage."""
        return threading.get_ident() == self._thread

    def run(self, job: _Job | None) -> None:
        """Process a job's state, then step as long as a caller waits."""
        self._thread = threading.get_ident()
        self.process(job)
        while any(job.wanted for job in self._jobs):
            try:
                self._step()
            except BaseException as error:
                self._fail(error)
            self._process_inbox()

    def process(self, job: _Job | None) -> None:
        """Start, end or ignore a job, depending on its state. None closes the engine."""
        if job is None:
            self._stop()
        elif job.over:
            pass
        elif self.stopped or self._failure is not None:
            self._end(job, self._end_error())
        elif job.closed or job.caller is None or job.caller() is None:
            self._end(job)
        elif job not in self._jobs:
            self._jobs.append(job)
            if not job.waiting:
                self._end(job)

    def _process_inbox(self) -> None:
        while not self.inbox.empty():
            message = self.inbox.get()
            if message is None:
                self.inbox.put(None)
                return
            self.process(message[1])

    def _step(self) -> None:
        for job in tuple(self._jobs):
            self._fill(job)
        ready: dict[_Job, list[RequestOutput]] = {}
        for output in self._engine.step():
            job = self._owners[output.request_id]
            if output.finished:
                del self._owners[output.request_id]
                job.in_flight.discard(output.request_id)
            ready.setdefault(job, []).append(output)
        for job, pieces in ready.items():
            job.wanted = not job.stream
            job.answers.put(pieces)
            if not (job.waiting or job.in_flight):
                self._end(job)

    def _fill(self, job: _Job) -> None:
        """Give the engine as many of a job's requests as its queue has room for."""
        engine = self._engine
        try:
            while job.waiting:
                if job.prepared is None:
                    prompt, params = job.waiting[0]
                    job.prepared = engine.request(prompt, params, embed=job.embed, stream=job.stream)
                request = job.prepared
                if not engine.has_room(request):
                    return
                engine.accept(request)
                self._owners[request.id] = job
                job.in_flight.add(request.id)
                job.request_ids.append(request.id)
                job.waiting.popleft()
                job.prepared = None
        except Exception as error:  # concerns this request alone
            self._end(job, error)

    def _end(self, job: _Job, error: BaseException | None = None) -> None:
        """Remove a job's requests from the engine, then put the end of the job into its answers."""
        if job in self._jobs:
            self._jobs.remove(job)
        if self._failure is None:
            try:
                self._abort(job)
            except BaseException as failure:
                self._fail(failure)
                error = error or self._end_error()
        job.over, job.caller = True, None
        job.answers.put(error)

    def _abort(self, job: _Job) -> None:
        for request_id in job.in_flight:
            self._engine.abort(request_id)
            del self._owners[request_id]
        job.in_flight.clear()
        while not (self._jobs or self._engine.idle):  # a step is still on the device
            self._engine.step()

    def _fail(self, error: BaseException) -> None:
        """End all present and future jobs, because the state of the device may be inconsistent."""
        self._failure = self._failure or error
        for job in tuple(self._jobs):
            self._end(job, self._end_error())

    def _end_error(self) -> JaxserveError:
        if self._failure is None:
            return _closed_error()
        text = f"the engine failed and must be opened again: {type(self._failure).__name__}: {self._failure}"
        error = EngineFailed(text)
        error.__cause__ = self._failure
        return error

    def _stop(self) -> None:
        if self.stopped:
            return
        self.stopped = True
        for job in tuple(self._jobs):
            self._end(job, _closed_error())
        try:
            self._engine.close()
        except BaseException as error:
            self.close_error = error


def _closed_error() -> EngineStopped:
    return EngineStopped("this LLM has been closed")


def _serve(inbox: Inbox) -> None:
    while (message := inbox.get()) is not None:
        worker, job = message
        worker.run(job)
        del message, worker, job  # an idle thread must keep no engine alive
    while not inbox.empty():
        if (message := inbox.get()) is not None:
            message[0].process(message[1])
