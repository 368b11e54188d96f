"""A thread that steps one instance of an `AsyncEngine`."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from jaxserve.core.errors import EngineFailed, EngineForked, EngineStopped
from jaxserve.core.request import RequestOutput
from jaxserve.engine.directory import Directory, Entry
from jaxserve.engine.instances import report_end
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.outputs import RequestState

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05  # how often a thread that shall stop is looked at, in case it has ended
STALL_CHECK_S = 0.005  # how often an instance looks whether one of its requests can go on, if none can

Item = RequestOutput | BaseException


@dataclass(eq=False)
class Stream:
    """A queue of one request's outputs for the asyncio loop that sent the request."""

    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[Item]
    admitted: asyncio.Future[None]

    @classmethod
    def new(cls) -> "Stream":
        """Return a stream for the running asyncio loop."""
        loop = asyncio.get_running_loop()
        return cls(loop, asyncio.Queue(), loop.create_future())

    async def next(self) -> RequestOutput:
        """Return the next output, or raise the error that ended the request early."""
        item = await self.items.get()
        error = item if isinstance(item, BaseException) else item.error
        if error is not None:
            raise error
        assert isinstance(item, RequestOutput)
        return item

    def put(self, item: Item) -> None:
        """Append an output or an error. Call from any thread."""
        call_soon(self.loop, lambda: self.items.put_nowait(item))

    def settle(self, error: BaseException | None = None) -> None:
        """Complete `admitted`: the request was accepted, or refused with an error. Call from any thread."""

        def settle() -> None:
            if self.admitted.done():
                return
            if error is None:
                self.admitted.set_result(None)
            else:
                self.admitted.set_exception(error)

        call_soon(self.loop, settle)


StreamEntry = Entry[Stream]


def fail(entry: StreamEntry, error: BaseException) -> None:
    """Tell the client of a request the error that ends or refuses it."""
    if entry.accepted:
        entry.owner.put(error)
    else:
        entry.owner.settle(error)


class Front(Protocol):
    """What a thread needs of the engine for requests that are not on its instance, or leave it."""

    def abort(self, entry: StreamEntry) -> None:
        """End a request, wherever it is."""
        ...

    def can_recover(self, name: str) -> bool:
        """Return whether the requests of an instance that fails go on on others."""
        ...

    def place(self, states: Iterable[RequestState], *, outgrown: bool = False) -> None:
        """Find instances for requests that have left their core, which could not hold them any more if `outgrown`."""
        ...


class Stop:
    """A stop of an instance's thread between two steps."""

    def __init__(self, thread: "InstanceThread"):
        self.thread = thread
        self.reached, self.over = threading.Event(), threading.Event()

    def wait(self, seconds: float) -> None:
        """Wait until the thread has stopped. Raise `EngineFailed` if it does not come, or `EngineStopped`."""
        thread, waited = self.thread, 0.0
        while not self.reached.wait(POLL_SECONDS):
            waited += POLL_SECONDS
            if not thread.alive and not self.reached.is_set():
                raise thread.end_error()
            if waited >= seconds:
                raise EngineFailed(f"instance {thread.name} has not ended its step for {seconds:.0f} s")


class InstanceThread:
    """A thread that steps one instance, takes commands between steps, and sends outputs back once per step."""

    def __init__(self, name: str, steps: StepLoop, directory: Directory[Stream], front: Front):
        """`start` starts the thread. Until then it only collects commands."""
        self.name, self.steps = name, steps
        self.failure: BaseException | None = None
        self.progress = steps.clock.now()  # time at which the latest step ended, or the thread was last idle
        self._directory, self._front = directory, front
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._started = self._stopping = self._retired = False
        self._over = False  # set before the thread takes its commands for the last time
        self._thread = threading.Thread(target=self._run, name=f"jaxserve-{name}", daemon=True)

    def start(self) -> None:
        """Begin to step, unless the thread has begun before."""
        if not self._started:
            # Wakes a thread that waits for commands.
            self.steps.wake = lambda: self._commands.put(lambda: None)
            self.steps.wake()  # for calls that have come before
            self.progress = self.steps.clock.now()
            self._thread.start()
            self._started = True  # afterwards, since a thread that has started and is not alive is one of a fork

    @property
    def started(self) -> bool:
        """True from the first `start` on."""
        return self._started

    @property
    def alive(self) -> bool:
        """True if the thread runs."""
        return self._thread.is_alive()

    def submit(self, entry: StreamEntry) -> None:
        """Queue a request for the instance. Its stream learns whether it is accepted. Call from any thread."""
        self._commands.put(lambda: self._add(entry))
        if self._over or (self._started and not self.alive):
            fail(entry, self.end_error() if self._over else EngineForked())
            self._directory.end(entry)

    def abort(self, entry: StreamEntry) -> None:
        """End a request before the next step, if it is still in flight. Call from any thread."""
        self._commands.put(lambda: self._abort(entry))

    def halt(self) -> Stop:
        """Let the thread stop between two steps, with no step on the device, until `Stop.over` is set."""
        stop = Stop(self)
        if self._started:
            self._commands.put(lambda: self._halt(stop))
        else:
            stop.reached.set()
        return stop

    @property
    def failed(self) -> bool:
        """True if the instance has failed and keeps its requests, which go on on other instances."""
        return self.failure is not None and not self._stopping

    @property
    def over(self) -> bool:
        """True if the thread has ended, or is about to because its instance has failed for good."""
        return self._started and (not self.alive or (self.failure is not None and self._stopping))

    def retire(self) -> None:
        """End the thread at its present stop. It has no requests any more."""
        self._retired = self._stopping = True

    def stop(self) -> None:
        """End the thread after the present step, and its requests with `EngineStopped`. Call from any thread."""
        self._commands.put(self._stop)

    def join(self) -> None:
        """Wait for the thread to end."""
        if self._started:
            self._thread.join()

    def end_error(self) -> BaseException:
        """Return the error that ends requests of a thread that has ended."""
        if self.failure is not None:
            return EngineFailed(f"the engine failed: {type(self.failure).__name__}: {self.failure}")
        return EngineStopped("the engine has stopped")

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._take_commands()
                if self.failed:
                    self.steps.run_calls()
                elif not self._stopping:
                    self._step()
            except BaseException as error:
                self._fail(error)
        self._over = not self._retired
        if not self._retired:
            self._end_requests()
        self._take_commands()

    def _step(self) -> None:
        self._deliver(self.steps.step())
        if outgrown := self.steps.core.take_outgrown():
            self._front.place(outgrown, outgrown=True)
        self.progress = self.steps.clock.now()

    def _fail(self, error: BaseException) -> None:
        """Step no more, and end, unless the requests can go on on other instances."""
        log.error("instance %s has failed", self.name, exc_info=error)
        self._stopping = self._stopping or self.failure is not None or not self._front.can_recover(self.name)
        self.failure = self.failure or error
        self.steps.core.metrics.failed()
        if not self._stopping:
            try:
                self._deliver(self.steps.abandon())
            except BaseException:
                log.exception("the requests of instance %s are lost", self.name)
                self._stopping = True

    def _end_requests(self) -> None:
        for entry in self._directory.on(self.name):
            if not entry.pending:  # the others' commands are still to come
                entry.owner.put(self.end_error())
                self._directory.end(entry)
                if self.failure is None:  # give back the pages of an intact core
                    self.steps.core.abort(entry.request.id, now=self.steps.clock.now())

    def _take_commands(self) -> None:
        """Run the waiting commands, or wait for one if there is nothing to compute."""
        idle = self.steps.idle or self.failure is not None
        block, timeout = (idle or self.steps.stalled) and not self._stopping, None if idle else STALL_CHECK_S
        while True:
            try:
                command = self._commands.get(block, timeout)
            except queue.Empty:
                return
            command()
            self.progress = self.steps.clock.now() if block else self.progress
            block = False

    def _stop(self) -> None:
        self._stopping = True

    def _halt(self, stop: Stop) -> None:
        if self._stopping or stop.over.is_set():
            return
        self.steps.run_calls()
        try:
            self._deliver(self.steps.drain())
        except BaseException as error:
            self._fail(error)
            if not self.failed:
                return
        stop.reached.set()
        stop.over.wait()
        self.progress = self.steps.clock.now()

    def _add(self, entry: StreamEntry) -> None:
        if self._retired or self._directory.get(entry.request.id) is not entry:
            return  # it was sent to another instance, or its client was told of the end of this thread
        error = self.end_error() if self._stopping else self._accept(entry)
        if error is not None:
            self._directory.end(entry)
            if entry.accepted:
                report_end(self.steps.core, entry, error, self.steps.clock.now())
            fail(entry, error)

    def _accept(self, entry: StreamEntry) -> BaseException | None:
        """Give a request to the core, and return the error with which it was refused."""
        try:
            if entry.state is None:
                self.steps.add(entry.request, self._directory.info, accepted=entry.accepted)
            else:
                self.steps.core.attach([entry.state], None, self.steps.clock.now())
        except Exception as error:
            return error
        entry.pending, entry.accepted, entry.state = False, True, None
        entry.owner.settle()
        return None

    def _abort(self, entry: StreamEntry) -> None:
        if self._directory.get(entry.request.id) is not entry:
            return  # it has ended, or was refused
        if entry.instance != self.name:
            self._front.abort(entry)
            return
        self._directory.end(entry)
        self.steps.core.abort(entry.request.id, now=self.steps.clock.now())

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        batches: dict[asyncio.AbstractEventLoop, list[tuple[Stream, RequestOutput]]] = {}
        for output in outputs:
            entry = self._directory.get(output.request_id)
            assert entry is not None
            if output.finished:
                self._directory.end(entry)
            batches.setdefault(entry.owner.loop, []).append((entry.owner, output))
        for loop, batch in batches.items():
            call_soon(loop, partial(_put_all, batch))


def _put_all(batch: list[tuple[Stream, RequestOutput]]) -> None:
    for stream, output in batch:
        stream.items.put_nowait(output)


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Run a callback in an asyncio loop, unless the loop was closed. Call from any thread."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        log.debug("a client's event loop was closed before its request ended")
