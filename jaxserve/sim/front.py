"""The front of a simulated cluster: its instances by name, which come and go, and the requests in flight."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from jaxserve.core.clock import Clock
from jaxserve.core.errors import JaxserveError
from jaxserve.core.request import Request, RequestOutput
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.directory import Directory, Entry, RouteOf
from jaxserve.engine.instances import EndedInstances
from jaxserve.engine.outputs import RequestState
from jaxserve.sim.instance import SimInstance
from jaxserve.telemetry import Snapshot, WaitingRoom, combine


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request of the workload: its arrival and its lengths."""

    arrival: float  # s
    input_tokens: int
    output_tokens: int
    prompt: tuple[int, ...] | None = None  # token ids; needed only if prompts share prefixes


@dataclass(slots=True)
class InFlight:
    """A request of the workload between its arrival and its answer."""

    index: int  # in order of arrival, from 0
    request: SimRequest
    sent_to: str | None = None  # the instance that has got it last


class SimFront:
    """The instances and the requests in flight, as a real engine's front has them (`engine.InstanceSet`)."""

    def __init__(
        self,
        instances: Iterable[SimInstance],
        info: ModelInfo,
        clock: Clock,
        *,
        route: RouteOf | None = None,
        max_model_len: Callable[[], int] | None = None,
    ):
        """`route` and `max_model_len` are as for `Directory`; without them the set of instances never changes."""
        self.instances = {instance.core.name: instance for instance in instances}  # the same object for ever
        self.lost: list[tuple[InFlight, str]] = []
        """Requests that no instance will ever hold, and why. The event loop takes them."""
        self.on_wake: Callable[[str], None] = lambda name: None
        """Called with the name of an instance whose next event has changed. The event loop sets it."""
        first = next(iter(self.instances.values()))
        self.directory: Directory[InFlight] = Directory(
            info,
            None,
            clock,
            self.instances,
            route=route,
            max_model_len=max_model_len,
            rejected=first.core.metrics.rejected,
        )
        self._changes = route is not None
        self._on_the_way: list[Entry[InFlight]] = []  # to instances that have ended
        self._ended: EndedInstances[SimInstance] = EndedInstances()
        for instance in self.instances.values():
            self._connect(instance)

    def _connect(self, instance: SimInstance) -> None:
        instance.on_wake = partial(self._wake_changed, instance.core.name)
        if self._changes:
            instance.info = lambda: self.directory.info

    def _wake_changed(self, name: str) -> None:
        self.on_wake(name)

    # -- what policies and samples see

    def snapshots(self) -> dict[str, Snapshot]:
        """Return the state of each instance after its latest step."""
        return {name: instance.snapshot() for name, instance in self.instances.items()}

    def snapshot(self) -> Snapshot:
        """Return the state of all instances together, with the totals of those that have ended."""
        return combine([*(instance.snapshot() for instance in self.instances.values()), *self._ended.totals])

    def waiting_room(self) -> WaitingRoom:
        """Return the state of the requests that no instance can hold now."""
        return self.directory.waiting_room()

    def longest(self, name: str) -> int:
        """Return the tokens that the longest sequence of an instance needs; 0 for an instance that has ended."""
        instance = self.instances.get(name)
        return 0 if instance is None else instance.core.scheduler.longest

    # -- requests

    def running_for(self, request: Request) -> int:
        """Return the number of sequences that run on the instance which a request would go to now."""
        name = self.directory.instance_for(request)
        return 0 if name is None else self.instances[name].running

    def add(self, request: Request, owner: InFlight) -> Entry[InFlight]:
        """Route a request. Raise `RequestError` or `QueueFull`, without any change, if it is refused."""
        return self.directory.add(request, owner)

    def send(self, entry: Entry[InFlight]) -> None:
        """Give a request to its instance, unless it waits in front of the instances, or its instance has got it."""
        if entry.pending and entry.instance is not None and entry.owner.sent_to != entry.instance:
            entry.owner.sent_to = entry.instance
            self.instances[entry.instance].submit(entry)

    def leave(self, states: Iterable[RequestState], *, outgrown: bool = False) -> None:
        """Find other instances for requests that have left their core, or let them wait."""
        left = list(states)
        for state in left:
            self.directory.leave(state, outgrown=outgrown)
        if left:
            self._send_waiting()

    # -- instances that come and go

    def stop(self, names: Collection[str], then: Callable[[], None]) -> None:
        """Let instances begin no further step, and call `then` when no step of theirs is on the device any more."""
        running = set(names)

        def has_stopped(name: str) -> None:
            running.discard(name)
            if not running:
                then()

        if not running:
            then()
        for name in names:
            self.instances[name].stop(partial(has_stopped, name))

    def go_on(self) -> None:
        """Let all stopped instances step again, also those that have begun meanwhile."""
        for instance in self.instances.values():
            if instance.stopping:
                instance.go_on()

    def replace(
        self, before: Collection[str], after: Mapping[str, SimInstance], homeless: Sequence[RequestState]
    ) -> None:
        """End some stopped instances, and add others, which step after `go_on`. Requests have moved before.

        Those without an instance, `homeless`, wait for one. Requests are not routed to the new instances before
        `reroute`.
        """
        ending = [self.instances[name] for name in before]
        instances = {name: each for name, each in self.instances.items() if name not in before} | dict(after)
        ids = {name: tuple(instance.core.request_ids) for name, instance in instances.items()}
        on_the_way, lost = self.directory.moved(instances, ids)
        assert {entry.request.id for entry in lost} == {state.request.id for state in homeless}
        self._on_the_way += on_the_way
        for name in before:
            del self.instances[name]
        self.instances |= after
        for instance in after.values():
            self._connect(instance)
            instance.stop(lambda: None)
        self._ended.add(ending)
        self._ended.settle(self.instances)
        self.leave(homeless)

    def reroute(self) -> None:
        """Route by the plan in force from now on, also the requests that wait."""
        self.directory.follow(self.instances)
        sent_again, self._on_the_way = self._on_the_way, []
        for entry in sent_again:
            self.directory.send_again(entry)
            self.send(entry)
        self._send_waiting()

    def _send_waiting(self) -> None:
        found, hopeless = self.directory.take_waiting()
        for entry in found:
            entry.owner.sent_to = None  # it may go to an instance again that it has left
            self.send(entry)
        for entry, item in hopeless:
            self.directory.end(entry)
            self.lost.append((entry.owner, _why(entry, item)))


def _why(entry: Entry[InFlight], item: RequestOutput | JaxserveError) -> str:
    if isinstance(item, JaxserveError):
        return str(item)
    return f"no instance can hold the {entry.needed} tokens that the request needs"
