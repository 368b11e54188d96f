"""The instances of a simulation, as the procedure of `control.regrouping` makes, moves and ends them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack

from jaxserve.control.movement import Movement, movement
from jaxserve.control.plan import InstancePlan
from jaxserve.control.resources import Resources
from jaxserve.control.transitions import Sleep, Waits
from jaxserve.core.clock import Clock
from jaxserve.engine.logged_controller import LoggedActuator
from jaxserve.engine.outputs import RequestState
from jaxserve.kvcache import PagePool
from jaxserve.sim.front import SimFront
from jaxserve.sim.instance import SimInstance
from jaxserve.sim.maker import SimMaker

NewActuator = Callable[[SimInstance], LoggedActuator]


class SimHost:
    """Simulated instances (`control.regrouping.InstanceHost`) without arrays, each with the actuator of its own plan.

    What would be moved is only counted. All programs count as compiled.
    """

    def __init__(self, maker: SimMaker, front: SimFront, resources: Resources, clock: Clock, new_actuator: NewActuator):
        """`resources` have the rates at which bytes move."""
        self._maker, self._front, self._resources, self._clock = maker, front, resources, clock
        self._new_actuator = new_actuator
        self.actuators = {name: new_actuator(instance) for name, instance in front.instances.items()}
        self.all_actuators = list(self.actuators.values())  # also those of ended instances
        self._moved: list[Movement] = []  # by merges and splits since `take_pause`
        self._seconds = 0.0  # of page copies since then
        self._gone: list[str] = []  # names of instances that have ended and are not released

    def instance(self, name: str) -> SimInstance:
        return self._front.instances[name]

    def take_pause(self) -> tuple[float, int]:
        """Return how long (s) it takes to move what was moved since the last call, and the bytes that cross links."""
        moved, self._moved = self._moved, []
        copying, self._seconds = self._seconds, 0.0
        seconds = sum(each.seconds(self._resources) for each in moved)
        return seconds + copying, sum(each.bytes_by_link for each in moved)

    # -- as `InstanceHost`

    def stage(self, plans: Sequence[InstancePlan], seconds: float) -> Waits[Mapping[str, None]]:
        yield Sleep(self._clock.now() + seconds)
        return dict.fromkeys(plan.name for plan in plans)

    def discard(self, staged: Mapping[str, None]) -> None:
        pass

    def open(self, plan: InstancePlan, staged: None) -> SimInstance:
        return self._maker.make(plan)

    def merge(
        self, members: Sequence[SimInstance], plan: InstancePlan, pages: PagePool, undo: ExitStack
    ) -> SimInstance:
        self._count([member.plan for member in members], [plan], pages.occupied)
        return self._maker.make(plan, pages)

    def split(
        self, whole: SimInstance, plans: Sequence[InstancePlan], pages: Sequence[PagePool], undo: ExitStack
    ) -> list[SimInstance]:
        groups = {page for part in pages for page in part.occupied}
        self._count([whole.plan], plans, [len(plans) * page for page in groups])
        return [self._maker.make(plan, own) for plan, own in zip(plans, pages, strict=True)]

    def move_pages(self, instance: SimInstance, moves: Mapping[int, int]) -> None:
        self._seconds += len(moves) * self._page_bytes(instance) / self._resources.memory_rate

    def copy_pages(self, source: SimInstance, target: SimInstance, pages: Mapping[int, int]) -> None:
        resources = self._resources
        self._seconds += len(pages) * self._page_bytes(source) / resources.link_rate + resources.link_latency

    def replace(
        self, before: Collection[str], after: Mapping[str, SimInstance], homeless: Sequence[RequestState]
    ) -> None:
        self._front.replace(before, after, homeless)
        new = {name: self._new_actuator(instance) for name, instance in after.items()}
        self.all_actuators += new.values()
        self.actuators |= new
        self._gone = [name for name in before if name not in after]

    def release(self, ended: Sequence[SimInstance]) -> Waits[None]:
        yield from ()
        for name in self._gone:
            del self.actuators[name]

    # -- what moves

    def _count(self, before: Sequence[InstancePlan], after: Sequence[InstancePlan], pages: Sequence[int]) -> None:
        """Take note of a merge or a split, whose merged side has contents in `pages`."""
        groups = len({page // max(len(before), len(after)) for page in pages})
        self._moved.append(movement(before, after, self._resources, groups))

    def _page_bytes(self, instance: SimInstance) -> int:
        return max(map(self._resources.page_bytes, instance.plan.stages))
