"""The instances of an `AsyncEngine`, each of which steps in a thread of its own."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from jaxserve.core.clock import Clock
from jaxserve.core.errors import EngineFailed, EngineStopped
from jaxserve.core.request import Request, RequestOutput
from jaxserve.engine.directory import Directory
from jaxserve.engine.instance_thread import InstanceThread, Stop, Stream, StreamEntry, fail
from jaxserve.engine.instances import STALL_SECONDS, EndedInstances, lost_request, report_end
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.outputs import RequestState
from jaxserve.telemetry import Snapshot, combine


class InstanceThreads:
    """The threads of all instances, and the requests that these serve. Methods may be called from any thread.

    It is an `InstanceSet`, which describes the methods that change the instances.
    """

    def __init__(self, instances: Mapping[str, StepLoop], directory: Directory[Stream], clock: Clock):
        """Start a thread for each instance."""
        self._directory, self._clock = directory, clock
        self._refusing = self._closed = False
        self._can_recover: Callable[[str], bool] = lambda name: False
        self._changing = threading.Lock()  # held while instances are stopped
        self._stops: dict[str, Stop] = {}  # by instance, while `stopped` is in progress
        self._ended: EndedInstances[StepLoop] = EndedInstances()
        # Never changed, but replaced while the directory's lock is held.
        self._threads = {name: InstanceThread(name, steps, directory, self) for name, steps in instances.items()}
        for thread in self._threads.values():
            thread.start()

    @property
    def threads(self) -> Mapping[str, InstanceThread]:
        """The threads by the names of their instances."""
        return self._threads

    @property
    def ready(self) -> bool:
        """True if all threads step, or are about to."""
        return not any(thread.over for thread in self._threads.values())

    @property
    def busy(self) -> bool:
        """True if a thread that has not failed has requests."""
        return any(
            thread.alive and not thread.over and (self._directory.on(name) or not thread.steps.idle)
            for name, thread in self._threads.items()
        )

    def snapshots(self) -> dict[str, Snapshot]:
        """Return the state of each instance by its name."""
        return {name: thread.steps.core.snapshot for name, thread in self._threads.items()}

    def snapshot(self) -> Snapshot:
        """Return the sum of the states, with the totals of instances that have ended."""
        return combine([*self.snapshots().values(), *self._ended.totals])

    def check_health(self) -> None:
        """Raise `EngineFailed` if a thread has died, or has work and makes no progress."""
        now = self._clock.now()
        for thread in self._threads.values():
            if thread.over and (thread.failure is not None or not self._closed):
                raise EngineFailed(f"the engine loop has ended: {thread.failure!r}")
            if thread.started and not thread.steps.idle and now - thread.progress > STALL_SECONDS:
                raise EngineFailed(f"no step has ended for {now - thread.progress:.0f} s although there is work")

    # -- requests

    def add(self, request: Request, stream: Stream) -> StreamEntry:
        """Send a request to the instance that the router chooses, or let it wait for one.

        Raise `RequestError` or `QueueFull` if it is refused at once. `stream.admitted` completes when an instance has
        accepted or refused it, or when it waits.
        """
        with self._directory.lock:
            entry = self._directory.add(request, stream)
            self._send(entry)
        return entry

    def abort(self, entry: StreamEntry) -> None:
        """End a request, wherever it is. No effect on one that has ended."""
        with self._directory.lock:
            if self._directory.get(entry.request.id) is not entry:
                return
            entry.aborted = True
            if entry.instance is None:
                self._directory.end(entry)
                self._report_end(entry, None)
            else:
                self._threads[entry.instance].abort(entry)

    def refuse(self) -> None:
        """End requests that wait for an instance with `EngineStopped`, now and from now on."""
        self._refusing = True
        self._send_waiting()

    def close(self) -> None:
        """End all requests with `EngineStopped`, and wait for all threads to end."""
        self._closed = True
        self.refuse()
        for thread in self._threads.values():
            thread.stop()
        with self._changing:  # then all threads have been started
            for thread in self._threads.values():
                thread.stop()
                thread.join()

    # -- instances that fail

    @property
    def failed(self) -> Mapping[str, BaseException]:
        return {name: t.failure for name, t in self._threads.items() if t.failed and t.failure is not None}

    def give_up(self, name: str) -> None:
        if (thread := self._threads.get(name)) is not None and thread.failed:
            thread.stop()

    def recover_by(self, can_recover: Callable[[str], bool]) -> None:
        self._can_recover = can_recover

    def can_recover(self, name: str) -> bool:
        return self._can_recover(name)

    # -- instances that come and go

    @property
    def loops(self) -> Mapping[str, StepLoop]:
        return {name: thread.steps for name, thread in self._threads.items()}

    @contextmanager
    def stopped(self, names: Collection[str]) -> Iterator[None]:
        with self._changing:
            threads = [self._threads[name] for name in names]
            stops = [thread.halt() for thread in threads]
            self._stops = {stop.thread.name: stop for stop in stops}
            try:
                for stop in stops:
                    stop.wait(STALL_SECONDS)
                yield
            finally:
                self._stops = {}
                for stop in stops:
                    stop.over.set()
                for thread in self._threads.values():
                    thread.start()
                self._ended.settle(self.loops)
                self.reroute()

    def replace(
        self, before: Collection[str], after: Mapping[str, StepLoop], homeless: Iterable[RequestState] = ()
    ) -> None:
        without_home = {state.request.id: state for state in homeless}
        ending = [self._threads[name] for name in before]
        assert all(thread.name in self._stops or not thread.started for thread in ending), "only stopped ones can end"
        with self._directory.lock:
            new = {name: InstanceThread(name, steps, self._directory, self) for name, steps in after.items()}
            threads = {name: thread for name, thread in self._threads.items() if name not in before} | new
            known = [name for name in (*self._stops, *after) if name in threads]
            ids = {name: tuple(threads[name].steps.core.request_ids) for name in known}
            on_the_way, lost = self._directory.moved(threads, ids)
            self._threads = threads
            for entry in on_the_way:
                self._directory.send_again(entry)
                self._send(entry)
            for entry in lost:
                if state := without_home.get(entry.request.id):
                    self._directory.leave(state)  # it is sent to an instance at the exit of `stopped`
                else:
                    self._end(entry, lost_request(entry.request))
        for thread in ending:
            thread.retire()
            if stop := self._stops.pop(thread.name, None):
                stop.over.set()
        for thread in ending:
            thread.join()
        self._ended.add(thread.steps for thread in ending)

    def place(self, states: Iterable[RequestState], *, outgrown: bool = False) -> None:
        with self._directory.lock:
            for state in states:
                self._directory.leave(state, outgrown=outgrown)
            self._send_waiting()

    def reroute(self) -> None:
        with self._directory.lock:
            self._directory.follow(self._threads)
            self._send_waiting()

    def _send(self, entry: StreamEntry) -> None:
        """Send a request to its instance, or accept one that waits. Call with the directory's lock."""
        if entry.instance is not None:
            self._threads[entry.instance].submit(entry)
        else:
            entry.owner.settle()

    def _send_waiting(self) -> None:
        """Send the waiting requests that an instance can hold now there, and end those that none will ever hold."""
        with self._directory.lock:
            found, hopeless = self._directory.take_waiting()
            for entry in found:
                self._send(entry)
            for entry, item in hopeless:
                self._end(entry, item)
            if self._refusing:
                for entry in self._directory.on(None):
                    self._end(entry, EngineStopped("the engine is shutting down"))

    def _end(self, entry: StreamEntry, item: RequestOutput | BaseException) -> None:
        self._directory.end(entry)
        self._report_end(entry, item)
        if isinstance(item, BaseException):
            fail(entry, item)
        else:
            entry.owner.put(item)

    def _report_end(self, entry: StreamEntry, item: RequestOutput | BaseException | None) -> None:
        core = next(iter(self._threads.values())).steps.core
        report_end(core, entry, item, self._clock.now())
