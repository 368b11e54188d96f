"""The set of an engine's instances, which changes while requests are served."""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

from jaxserve.core.errors import EngineFailed, EngineStopped
from jaxserve.core.request import FinishReason, Request, RequestOutput
from jaxserve.engine.core import EngineCore
from jaxserve.engine.directory import Entry
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.outputs import RequestState
from jaxserve.telemetry import Snapshot, WaitingRoom, combine

# Seconds after which an instance that does not come to the end of its step counts as stuck.
STALL_SECONDS = 120.0


class InstanceSet(Protocol):
    """The instances of an engine, for whoever changes them. Methods may be called from any thread but the engine's.

    A change is one `replace` inside `stopped`, between which requests are moved from core to core.
    """

    @property
    def loops(self) -> Mapping[str, StepLoop]:
        """The step loops of the present instances by name."""
        ...

    def stopped(self, names: Collection[str]) -> AbstractContextManager[None]:
        """Return a context in which instances are between two steps, with no step on the device.

        All outputs have been delivered. The instances, or those that replaced them, go on at its exit, and requests are
        then routed by the plan in force. Raise `EngineFailed` if an instance does not stop in time, or `EngineStopped`
        if the engine ends; all go on then. One thread at a time can have instances stopped; others wait for it.
        """
        ...

    def replace(
        self, before: Collection[str], after: Mapping[str, StepLoop], homeless: Iterable[RequestState] = ()
    ) -> None:
        """End some stopped instances, and add others, or raise and change nothing.

        Requests have been moved between the cores before. The `homeless` ones have left all cores without their pages,
        and are placed as by `place`. The new loops first step at the exit of `stopped`. Any other request of `before`
        that is in no core of the present instances, and was not given to `place`, ends with `EngineFailed`.
        """
        ...

    def place(self, states: Iterable[RequestState]) -> None:
        """Find instances for requests that have left their core, and let those wait that no instance can hold now.

        They have given up their pages, and are computed again. A sequence that no plan can hold ends by its length.
        """
        ...

    @property
    def failed(self) -> Mapping[str, BaseException]:
        """The instances that have failed and keep their requests, by name, with what their steps have raised.

        They step no more, and count as stopped. They end by `replace` or `give_up`.
        """
        ...

    def give_up(self, name: str) -> None:
        """End the requests of an instance that has failed, with an error. No effect on others."""
        ...

    def recover_by(self, can_recover: Callable[[str], bool]) -> None:
        """Let instances that fail keep their requests from now on if `can_recover(name)`, for a change that follows."""
        ...

    def waiting_room(self) -> WaitingRoom:
        """Return the state of the requests that no instance can hold now."""
        ...

    def reroute(self) -> None:
        """Route by the plan in force from now on, also the requests that wait. Call it after a change of the plan."""
        ...


def lost_request(request: Request) -> EngineFailed:
    """Return the error of a request that a change of the instances has lost."""
    return EngineFailed(f"request {request.id} was lost when its instance ended")


def report_end(core: EngineCore, entry: Entry[Any], item: RequestOutput | BaseException | None, now: float) -> None:
    """Report the end of a request that is in no core, by means of any core.

    It ends with its last output, with an error, or with None if its client has given it up.
    """
    state = entry.state or RequestState(entry.request, [])
    if isinstance(item, RequestOutput):
        reason = state.sequences[0].finish_reason or FinishReason.STOP
    else:
        reason = FinishReason.ABORT if item is None or isinstance(item, EngineStopped) else FinishReason.ERROR
    core.report_end(state, reason, now)


class HasCore(Protocol):
    """An instance, real or simulated."""

    @property
    def core(self) -> EngineCore: ...


InstanceT = TypeVar("InstanceT", bound=HasCore)


class EndedInstances(Generic[InstanceT]):
    """The instances that have ended: their metrics show no gauges any more, and their totals are kept."""

    def __init__(self) -> None:
        self.totals: tuple[Snapshot, ...] = ()  # at most one, the sum
        self._ending: list[InstanceT] = []

    def add(self, ending: Iterable[InstanceT]) -> None:
        """Take note of instances that end, unless they are back when `settle` is called."""
        self._ending += ending

    def settle(self, present: Mapping[str, InstanceT]) -> None:
        """Count the instances that have ended, given those that are there now."""
        ended = [steps for steps in self._ending if steps not in present.values()]
        self._ending = []
        for steps in ended:
            steps.core.metrics.end()
            steps.core.close()
        if ended:
            self.totals = (combine([*self.totals, *(steps.core.snapshot.totals for steps in ended)]),)
