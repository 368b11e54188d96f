"""The instances of a simulation, as the procedure of `control.regrouping` makes, moves and ends them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import cast

from jaxserve.control.lane_moves import Trade
from jaxserve.control.movement import Movement, kv_movement, lane_movement, movement
from jaxserve.control.plan import InstancePlan
from jaxserve.control.resources import Resources
from jaxserve.control.transitions import Sleep, Waits
from jaxserve.core.block_names import is_layer
from jaxserve.core.clock import Clock
from jaxserve.engine.logged_controller import LoggedActuator
from jaxserve.engine.outputs import RequestState
from jaxserve.kvcache import DividedPool, PagePool
from jaxserve.sim.front import SimFront
from jaxserve.sim.instance import SimInstance
from jaxserve.sim.maker import SimMaker

LayersToChange = tuple[Sequence[str], bool]  # layers, and whether they will be run by all devices together
NewActuator = Callable[[SimInstance], LoggedActuator]
Sides = tuple[Sequence[InstancePlan], Sequence[InstancePlan]]  # before a regroup and after it


@dataclass(frozen=True)
class Chunk:
    """KV pages that an instance sends at once, beside serving."""

    time: float  # s, of its begin
    instance: str
    link_bytes: int
    end: float  # s


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
        self._members: dict[SimInstance, tuple[InstancePlan, Sequence[InstancePlan]]] = {}  # see `know_members`
        self._sides: dict[SimInstance, Sides] = {}  # by the first instance that exchanges pages
        self.chunks: list[Chunk] = []
        """The KV pages that instances have exchanged beside serving, in order."""

    def instance(self, name: str) -> SimInstance:
        return self._front.instances[name]

    @property
    def failed(self) -> Mapping[str, BaseException]:
        return {}  # simulated devices do not fail

    def abandon(self, instance: SimInstance, lost: Collection[int]) -> None:
        raise AssertionError("simulated instances do not fail")

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

    def open(self, plan: InstancePlan, staged: None, undo: ExitStack) -> SimInstance:
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

    def stage_layers(self, plans: Sequence[InstancePlan], seconds: float) -> Waits[None]:
        yield Sleep(self._clock.now() + seconds)

    def discard_layers(self, staged: None) -> None:
        pass

    def drop(
        self,
        members: Sequence[SimInstance],
        trades: Sequence[Trade],
        plan: InstancePlan,
        pages: PagePool,
        undo: ExitStack,
    ) -> SimInstance:
        made = self._maker.make(plan, pages)
        self._sides[made] = [member.plan for member in members], [plan]
        return made

    def restore(
        self,
        whole: SimInstance,
        trades: Sequence[Trade],
        plans: Sequence[InstancePlan],
        pages: Sequence[PagePool],
        undo: ExitStack,
    ) -> list[SimInstance]:
        made = [self._maker.make(plan, own) for plan, own in zip(plans, pages, strict=True)]
        self._sides[made[0]] = [whole.plan], plans
        return made

    # -- as `ExchangeHost`

    def send(self, instances: Sequence[SimInstance], index: int, rows: Sequence[int]) -> Chunk:
        sender, now = instances[index], self._clock.now()
        moved = lane_movement(*self._sides[instances[0]], len(rows), self._resources)
        end = sender.send_pages(moved.seconds(self._resources))
        self.chunks.append(Chunk(now, sender.core.name, moved.bytes_by_link // len(instances), end))
        return self.chunks[-1]

    def arrival(self, sent: Sequence[Chunk]) -> Waits[None]:
        yield Sleep(max(chunk.end for chunk in sent))

    def receive(self, instances: Sequence[SimInstance], index: int, sent: Sequence[Chunk]) -> None:
        pass

    def end_exchange(self, instances: Sequence[SimInstance]) -> None:
        del self._sides[instances[0]]

    # -- pages

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

    def release(self, ended: Sequence[SimInstance]) -> Waits[None]:
        yield from ()
        for name in [instance.core.name for instance in ended]:
            if name not in self._front.instances:
                del self.actuators[name]

    # -- as `GradualHost`

    def begin_apart(
        self,
        members: Sequence[SimInstance],
        plan: InstancePlan,
        plans: Sequence[InstancePlan],
        pages: DividedPool,
        undo: ExitStack,
    ) -> SimInstance:
        parts = [_without_layers(member) for member in plans]
        self._moved.append(movement(parts, [_without_layers(plan)], self._resources))
        whole = self._maker.make(plan, pages)
        self.know_members(whole, plan, plans)
        return whole

    def know_members(self, instance: SimInstance, plan: InstancePlan, plans: Sequence[InstancePlan]) -> None:
        self._members[instance] = plan, tuple(plans)

    def load_layers(self, instance: SimInstance, layers: Sequence[str], *, joint: bool) -> Waits[LayersToChange]:
        whole, parts = self._layers(instance, layers)
        before, after = (parts, [whole]) if joint else ([whole], parts)
        yield Sleep(self._clock.now() + movement(before, after, self._resources).seconds(self._resources))
        return layers, joint

    def change_layers(self, instance: SimInstance, loaded: LayersToChange) -> LayersToChange:
        layers, joint = loaded
        _, parts = self._layers(instance, layers)
        groups = {page for side in cast(DividedPool, instance.core.scheduler.pages).sides for page in side.occupied}
        self._moved.append(kv_movement(parts, len(groups), self._resources))
        return layers, not joint

    def free_layers(self, replaced: LayersToChange) -> None:
        pass

    def end_apart(
        self, instance: SimInstance, plans: Sequence[InstancePlan], pages: Sequence[PagePool], undo: ExitStack
    ) -> list[SimInstance]:
        whole, parts = self._members.pop(instance)
        self._moved.append(movement([_without_layers(whole)], list(map(_without_layers, parts)), self._resources))
        return [self._maker.make(plan, own) for plan, own in zip(plans, pages, strict=True)]

    def leave(self, requests: Sequence[RequestState]) -> None:
        self._front.leave(requests)

    def _layers(self, instance: SimInstance, layers: Sequence[str]) -> tuple[InstancePlan, list[InstancePlan]]:
        """Return an instance and its members with only some layers."""
        whole, members = self._members[instance]
        return _only(whole, layers), [_only(member, layers) for member in members]

    # -- what moves

    def _count(self, before: Sequence[InstancePlan], after: Sequence[InstancePlan], pages: Sequence[int]) -> None:
        """Take note of a merge or a split, whose merged side has contents in `pages`."""
        groups = len({page // max(len(before), len(after)) for page in pages})
        self._moved.append(movement(before, after, self._resources, groups))

    def _page_bytes(self, instance: SimInstance) -> int:
        return max(map(self._resources.page_bytes, instance.plan.stages))


def _only(plan: InstancePlan, blocks: Collection[str]) -> InstancePlan:
    """Return a plan with only some blocks."""
    stages = (
        replace(stage, blocks=tuple(block for block in stage.blocks if block.block in blocks)) for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


def _without_layers(plan: InstancePlan) -> InstancePlan:
    return _only(plan, [block.block for block in plan.blocks if not is_layer(block.block)])
