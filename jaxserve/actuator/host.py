"""The instances on real devices, as the procedure of `control.regrouping` makes, moves and ends them."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import jax

from jaxserve.actuator.actuator import PlanActuator
from jaxserve.actuator.apart import ApartInstance
from jaxserve.actuator.lane_pools import joined_lanes, parted_lanes
from jaxserve.actuator.maker import InstanceMaker, Parts
from jaxserve.actuator.throttle import Throttle
from jaxserve.control.lane_moves import Trade
from jaxserve.control.plan import InstancePlan
from jaxserve.control.transitions import Waits
from jaxserve.engine.instances import InstanceSet
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.outputs import RequestState
from jaxserve.executor.blocks import LoadedBlock
from jaxserve.executor.executor import BlockExecutor
from jaxserve.executor.kv_exchange import Side
from jaxserve.executor.lane_exchange import LaneExchange, Sent
from jaxserve.executor.page_copies import copy_pages
from jaxserve.kvcache import DividedPool, PagePool
from jaxserve.telemetry import Snapshot, WaitingRoom


@dataclass
class LayersToChange:
    """Blocks of layers: one for all devices together, or one for each member."""

    joint: bool
    blocks: dict[str, list[LoadedBlock]]


NewActuator = Callable[[str, StepLoop], PlanActuator]


class DeviceHost:
    """The instances of an engine (`control.regrouping.InstanceHost`), each with the actuator of its own plan.

    Merges and splits work block by block: new blocks are made of the shares that their devices have, and then the old
    ones are freed.
    """

    def __init__(
        self,
        maker: InstanceMaker,
        instances: Mapping[str, StepLoop],
        new_actuator: NewActuator,
        new_throttle: Callable[[Callable[[], bool], Callable[[float], object]], Throttle],
    ):
        """`new_throttle(are_busy, wait)` returns a throttle of copies that are made while instances serve."""
        self._maker, self._new_actuator = maker, new_actuator
        self._closing = threading.Event()
        self._throttle = new_throttle(self._are_busy, self._closing.wait)
        self.instances = dict(instances)
        self.actuators = {name: new_actuator(name, steps) for name, steps in instances.items()}
        self._ended: dict[StepLoop, PlanActuator] = {}  # these instances with their actuators
        self._apart: dict[StepLoop, ApartInstance] = {}  # instances with layers that their members run apart
        self._exchanges: dict[StepLoop, LaneExchange] = {}  # by the group, or by the first member of one
        self._front: InstanceSet | None = None

    def _are_busy(self) -> bool:
        return not all(steps.idle for steps in tuple(self.instances.values()))

    @property
    def front(self) -> InstanceSet:
        """The engine's front, which steps the instances and sends requests to them."""
        assert self._front is not None, "the front is connected before the first regroup"
        return self._front

    def connect(self, front: InstanceSet) -> None:
        """Take the engine's front."""
        self._front = front

    def instance(self, name: str) -> StepLoop:
        return self.instances[name]

    @property
    def failed(self) -> Mapping[str, BaseException]:
        return {} if self._front is None else self._front.failed

    def abandon(self, instance: StepLoop, lost: Collection[int]) -> None:
        executor, devices = _executor(instance), {self._maker.resolved.devices[index] for index in lost}
        executor.pools.close()
        executor.pools.give_up()
        for block in executor.blocks:
            if not devices.isdisjoint(block.placement.devices):
                block.free()  # so that nothing is copied from there

    # -- what policies see

    def snapshots(self) -> dict[str, Snapshot]:
        """Return the state of each instance after its latest step."""
        return {name: steps.core.snapshot for name, steps in tuple(self.instances.items())}

    def waiting_room(self) -> WaitingRoom:
        """Return the state of the requests that no instance can hold now."""
        return WaitingRoom() if self._front is None else self._front.waiting_room()

    def longest(self, name: str) -> int:
        """Return the tokens that the longest sequence of an instance needs; 0 for an instance that has ended."""
        steps = self.instances.get(name)
        return 0 if steps is None else steps.core.scheduler.longest

    # -- instances on devices of their own

    def stage(self, plans: Sequence[InstancePlan], seconds: float) -> Waits[Mapping[str, Parts]]:
        yield from ()
        staged: dict[str, Parts] = {}
        throttle = self._throttle
        throttle.worked()
        try:
            for plan in plans:
                staged[plan.name] = self._maker.load(plan, between=throttle.worked, copied=throttle.copied)
        except BaseException:
            self.discard(staged)
            raise
        return staged

    def discard(self, staged: Mapping[str, Parts]) -> None:
        for parts in staged.values():
            for block in parts.blocks:
                block.free()
            parts.pools.close()

    def open(self, plan: InstancePlan, staged: Parts, undo: ExitStack) -> StepLoop:
        return self._make(plan, staged, None, undo)

    def _make(self, plan: InstancePlan, parts: Parts, pages: PagePool | None, undo: ExitStack) -> StepLoop:
        """Return the step loop of a new instance. To undo that, it ends, and its parts stay."""
        steps = self._maker.make(plan, parts, pages)
        undo.callback(_end, steps)
        return steps

    # -- merge and split

    def merge(self, members: Sequence[StepLoop], plan: InstancePlan, pages: PagePool, undo: ExitStack) -> StepLoop:
        executors = [_executor(member) for member in members]
        (blocks,) = self._reload(executors, [plan], undo)
        exchange = self._maker.programs.exchange(list(map(_side, executors)), self._maker.side(plan))
        groups = _groups(pages, len(members))
        pools = exchange.merge([executor.pools for executor in executors], groups)

        def part() -> None:
            for executor, own in zip(executors, exchange.split(pools, groups), strict=True):
                executor.pools.take_over(own)

        undo.callback(part)
        return self._make(plan, Parts(blocks, pools), pages, undo)

    def split(
        self, whole: StepLoop, plans: Sequence[InstancePlan], pages: Sequence[PagePool], undo: ExitStack
    ) -> list[StepLoop]:
        executor = _executor(whole)
        exchange = self._maker.programs.exchange(list(map(self._maker.side, plans)), _side(executor))
        groups = sorted({page for part in pages for page in part.occupied})
        pools = exchange.split(executor.pools, groups)
        undo.callback(lambda: executor.pools.take_over(exchange.merge(pools, groups)))
        blocks = self._reload([executor], plans, undo)
        parts = zip(plans, map(Parts, blocks, pools), pages, strict=True)
        return [self._make(plan, part, own, undo) for plan, part, own in parts]

    def _reload(
        self, old: Sequence[BlockExecutor], plans: Sequence[InstancePlan], undo: ExitStack
    ) -> list[list[LoadedBlock]]:
        """Return the blocks of new instances, made one by one of those that old ones have, which are then freed."""
        load = self._maker.programs.builder.load
        made: list[list[LoadedBlock]] = [[] for _ in plans]
        placements = [[self._maker.placement(stage) for stage in plan.stages for _ in stage.blocks] for plan in plans]
        for index in range(len(old[0].blocks)):
            before = [executor.blocks[index] for executor in old]
            for own, plan, devices in zip(made, plans, placements, strict=True):
                block = before[0].block
                own.append(load(block, plan.precision(block), devices[index]))
                undo.callback(own[-1].free)
            undo.callback(self._restore, old, before)
            for block in before:
                block.free()
        return made

    def _restore(self, old: Sequence[BlockExecutor], before: Sequence[LoadedBlock]) -> None:
        """Load blocks again that were freed."""
        load = self._maker.programs.builder.load
        for executor, block in zip(old, before, strict=True):
            executor.replace([load(block.block, block.precision, block.placement)])

    # -- drop and restore

    def drop(
        self,
        members: Sequence[StepLoop],
        trades: Sequence[Trade],
        plan: InstancePlan,
        pages: PagePool,
        undo: ExitStack,
    ) -> StepLoop:
        executors = list(map(_executor, members))
        (blocks,) = self._reload(executors, [plan], undo)
        pools, exchange = joined_lanes(self._maker, executors, trades, plan, undo)
        steps = self._make(plan, Parts(blocks, pools), pages, undo)
        self._begin_exchange(steps, exchange, undo)
        return steps

    def restore(
        self,
        whole: StepLoop,
        trades: Sequence[Trade],
        plans: Sequence[InstancePlan],
        pages: Sequence[PagePool],
        undo: ExitStack,
    ) -> list[StepLoop]:
        executor = _executor(whole)
        pools, exchange = parted_lanes(self._maker, executor, trades, plans, undo)
        parts = zip(plans, map(Parts, self._reload([executor], plans, undo), pools), pages, strict=True)
        members = [self._make(plan, part, own, undo) for plan, part, own in parts]
        self._begin_exchange(members[0], exchange, undo)
        return members

    def _begin_exchange(self, steps: StepLoop, exchange: LaneExchange, undo: ExitStack) -> None:
        self._exchanges[steps] = exchange
        undo.callback(self._exchanges.pop, steps)

    def stage_layers(self, plans: Sequence[InstancePlan], seconds: float) -> Waits[list[LoadedBlock]]:
        yield from ()
        staged: list[LoadedBlock] = []
        load, throttle = self._maker.programs.builder.load, self._throttle
        throttle.worked()
        try:
            for plan in plans:
                for stage in plan.stages:
                    placement = self._maker.placement(stage)
                    for block in stage.blocks:
                        staged.append(
                            load(
                                block.block,
                                block.precision,
                                placement,
                                between=throttle.worked,
                                copied=throttle.copied,
                            )
                        )
        except BaseException:
            self.discard_layers(staged)
            raise
        return staged

    def discard_layers(self, staged: Sequence[LoadedBlock] | None) -> None:
        for block in staged or ():
            block.free()

    def send(self, instances: Sequence[StepLoop], index: int, rows: Sequence[int]) -> Sent:
        return self._exchanges[instances[0]].send(index, rows)

    def arrival(self, sent: Sequence[Sent]) -> Waits[None]:
        yield from ()
        jax.block_until_ready([part.contents for part in sent])

    def receive(self, instances: Sequence[StepLoop], index: int, sent: Sequence[Sent]) -> None:
        for part in sent:
            self._exchanges[instances[0]].receive(index, part)

    def end_exchange(self, instances: Sequence[StepLoop]) -> None:
        self._exchanges.pop(instances[0]).close()

    # -- merge and split layer by layer (`control.gradual.GradualHost`)

    def leave(self, requests: Sequence[RequestState]) -> None:
        self.front.place(requests)

    def begin_apart(
        self,
        members: Sequence[StepLoop],
        plan: InstancePlan,
        plans: Sequence[InstancePlan],
        pages: PagePool,
        undo: ExitStack,
    ) -> StepLoop:
        apart = ApartInstance(self._maker, plan, plans)
        steps = self._make(plan, apart.begin(list(map(_executor, members)), undo), pages, undo)
        apart.executor = _executor(steps)
        self._apart[steps] = apart
        undo.callback(self._apart.pop, steps)
        return steps

    def know_members(self, instance: StepLoop, plan: InstancePlan, plans: Sequence[InstancePlan]) -> None:
        self._apart[instance] = apart = ApartInstance(self._maker, plan, plans)
        apart.executor = _executor(instance)

    def load_layers(self, instance: StepLoop, layers: Sequence[str], *, joint: bool) -> Waits[LayersToChange]:
        yield from ()
        apart, made = self._apart[instance], LayersToChange(joint, {})
        self._throttle.worked()
        try:
            for layer in layers:
                made.blocks[layer] = [apart.load_joint(layer)] if joint else apart.load_apart(layer)
                self._throttle.worked()
        except BaseException:
            self.free_layers(made)
            raise
        return made

    def change_layers(self, instance: StepLoop, loaded: LayersToChange) -> LayersToChange:
        apart, pages = self._apart[instance], cast(DividedPool, instance.core.scheduler.pages)
        replaced = LayersToChange(not loaded.joint, {})
        with ExitStack() as undo:
            for layer, blocks in loaded.blocks.items():
                if loaded.joint:
                    replaced.blocks[layer] = apart.join(layer, blocks[0], pages)
                    undo.callback(lambda layer=layer: apart.part(layer, replaced.blocks[layer], pages))
                else:
                    replaced.blocks[layer] = apart.part(layer, blocks, pages)
                    undo.callback(lambda layer=layer: apart.join(layer, replaced.blocks[layer][0], pages))
            undo.pop_all()
        return replaced

    def free_layers(self, replaced: LayersToChange) -> None:
        for blocks in replaced.blocks.values():
            for block in blocks:
                block.free()

    def end_apart(
        self, instance: StepLoop, plans: Sequence[InstancePlan], pages: Sequence[PagePool], undo: ExitStack
    ) -> list[StepLoop]:
        parts = self._apart[instance].end(undo)
        return [self._make(plan, part, own, undo) for plan, part, own in zip(plans, parts, pages, strict=True)]

    # -- pages

    def move_pages(self, instance: StepLoop, moves: Mapping[int, int]) -> None:
        _executor(instance).pools.move(moves)

    def copy_pages(self, source: StepLoop, target: StepLoop, pages: Mapping[int, int]) -> None:
        copy_pages(_executor(source).pools, _executor(target).pools, pages)

    # -- the engine's front

    def replace(self, before: Collection[str], after: Mapping[str, StepLoop], homeless: Sequence[RequestState]) -> None:
        with ExitStack() as undo:
            actuators = {}
            for name, steps in after.items():
                actuators[name] = self._new_actuator(name, steps)
                undo.callback(actuators[name].close)
            self.front.replace(before, after, homeless)
            undo.pop_all()
        ended = {name: (self.instances.pop(name), self.actuators[name]) for name in before}
        self.instances |= after
        self.actuators |= actuators
        self._ended |= dict(ended.values())

    def release(self, ended: Sequence[StepLoop]) -> Waits[None]:
        yield from ()
        for steps in ended:
            if steps.core.name not in self.instances:  # otherwise another one has taken its name
                self.actuators.pop(steps.core.name, None)
            self._ended.pop(steps).close()
            self._apart.pop(steps, None)
            steps.core.close()
            _executor(steps).close()

    def close(self) -> None:
        """Free everything. No instance may run any more."""
        self._closing.set()
        for actuator in (*self.actuators.values(), *self._ended.values()):
            actuator.close()
        for exchange in self._exchanges.values():  # that have not come to their end
            exchange.close()
        for steps in (*self.instances.values(), *self._ended):
            _executor(steps).close()


def _executor(steps: StepLoop) -> BlockExecutor:
    return cast(BlockExecutor, steps.executor)


def _end(steps: StepLoop) -> None:
    """End an instance that has never served, whose blocks and pools others have."""
    steps.core.metrics.end()
    steps.core.close()
    _executor(steps).end()


def _side(executor: BlockExecutor) -> Side:
    return Side(executor.pools.programs, executor.pools.sizes)


def _groups(pages: PagePool, members: int) -> list[int]:
    """Return the pages of the members of which any has contents in the joined pool."""
    return sorted({page // members for page in pages.occupied})
