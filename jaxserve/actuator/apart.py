"""An instance on real devices whose layers its members run apart, some of them or all (`executor.apart`)."""

from collections.abc import Sequence
from contextlib import ExitStack

from jaxserve.actuator.maker import InstanceMaker, Parts
from jaxserve.control.plan import InstancePlan
from jaxserve.core.block_names import is_layer
from jaxserve.executor.apart import ApartPlacement
from jaxserve.executor.blocks import LoadedBlock
from jaxserve.executor.executor import BlockExecutor
from jaxserve.executor.pools import Pools
from jaxserve.kvcache import DividedPool
from jaxserve.parallel.placement import POOL_AXES


class ApartInstance:
    """A merged instance with the members that run layers of it apart."""

    def __init__(self, maker: InstanceMaker, whole: InstancePlan, members: Sequence[InstancePlan]):
        """`members` are the plans of the members, in order. All have one stage."""
        self._maker, self._whole, self._members = maker, whole, tuple(members)
        self._placements = [maker.placement(plan.stages[0]) for plan in members]
        self._place = ApartPlacement(maker.placement(whole.stages[0]), len(members))
        self._exchange = maker.programs.exchange([maker.side(plan) for plan in members], maker.side(whole))
        self._layers = [block.block for block in whole.blocks if is_layer(block.block)]
        self._own: dict[str, list[LoadedBlock]] = {}  # the members' blocks of layers that are apart
        self.executor: BlockExecutor | None = None

    # -- from members to an instance, all of whose layers are apart

    def begin(self, members: Sequence[BlockExecutor], undo: ExitStack) -> Parts:
        """Return the parts of the instance that members become. Of the decoder layers nothing moves."""
        builder = self._maker.programs.builder
        blocks: list[LoadedBlock] = []
        for index, block in enumerate(self._whole.blocks):
            own = [member.blocks[index] for member in members]
            if is_layer(block.block):
                self._own[block.block] = own
                blocks.append(builder.apart(own, self._place))
                continue
            blocks.append(builder.load(block.block, block.precision, self._place.placement))
            undo.callback(blocks[-1].free)
            undo.callback(_restore, builder.load, members, own)
            for loaded in own:
                loaded.free()
        joined = [
            self._place.join_pools([member.pools[layer] for member in members]) for layer in range(len(self._layers))
        ]
        for member in members:
            undo.callback(setattr, member, "blocks", member.blocks)
            member.blocks = []  # they are not the member's to free any more
            member.pools.give_up()
        side = self._maker.side(self._whole)
        pools = Pools(side.programs, side.sizes, joined)
        undo.callback(self._give_back, members, pools)
        return Parts(blocks, pools)

    def _give_back(self, members: Sequence[BlockExecutor], pools: Pools) -> None:
        for member, own in zip(members, self._member_pools(pools), strict=True):
            member.pools.take_over(own)

    # -- layers, one after another

    def load_joint(self, layer: str) -> LoadedBlock:
        """Return a layer for all devices together, made of what the members have."""
        precision = self._whole.precision(layer)
        return self._maker.programs.builder.load(layer, precision, self._place.placement)

    def load_apart(self, layer: str) -> list[LoadedBlock]:
        """Return a layer for each member."""
        precision = self._whole.precision(layer)
        return [self._maker.programs.builder.load(layer, precision, placement) for placement in self._placements]

    def join(self, layer: str, joint: LoadedBlock, pages: DividedPool) -> list[LoadedBlock]:
        """Run a layer on all devices together from the next step on. Return the blocks that it replaces."""
        executor = self._running
        self._exchange.join(executor.pools, self._layers.index(layer), _with_contents(pages))
        executor.replace([joint])
        return self._own.pop(layer)

    def part(self, layer: str, own: list[LoadedBlock], pages: DividedPool) -> list[LoadedBlock]:
        """Let the members run a layer apart from the next step on. Return the blocks that it replaces."""
        executor = self._running
        self._exchange.part(executor.pools, self._layers.index(layer), _with_contents(pages))
        self._own[layer] = own
        return executor.replace([self._maker.programs.builder.apart(own, self._place)])

    # -- from an instance whose layers are all apart to its members

    def end(self, undo: ExitStack) -> list[Parts]:
        """Return the parts of the instances that the members become. Of the decoder layers nothing moves."""
        builder, executor = self._maker.programs.builder, self._running
        made: list[list[LoadedBlock]] = [[] for _ in self._members]
        for index, block in enumerate(self._whole.blocks):
            if is_layer(block.block):
                own = self._own[block.block]
            else:
                own = [builder.load(block.block, block.precision, placement) for placement in self._placements]
                for loaded in own:
                    undo.callback(loaded.free)
                undo.callback(_restore, builder.load, [executor], [executor.blocks[index]])
                executor.blocks[index].free()
            for blocks, loaded in zip(made, own, strict=True):
                blocks.append(loaded)
        pools = self._member_pools(executor.pools)
        undo.callback(self._take_back, executor, pools)
        return list(map(Parts, made, pools))

    def _take_back(self, executor: BlockExecutor, pools: Sequence[Pools]) -> None:
        joined = [self._place.join_pools([own[layer] for own in pools]) for layer in range(len(self._layers))]
        executor.pools.take_over(Pools(executor.pools.programs, executor.pools.sizes, joined))

    def _member_pools(self, pools: Pools) -> list[Pools]:
        """Return the pools of an instance whose layers are all apart as those of its members."""
        shardings = [placement.sharding(POOL_AXES) for placement in self._placements]
        parts = zip(*(self._place.part_pool(pool, shardings) for pool in pools[:]), strict=True)
        pools.give_up()
        sides = [self._maker.side(plan) for plan in self._members]
        return [Pools(side.programs, side.sizes, own) for side, own in zip(sides, parts, strict=True)]

    @property
    def _running(self) -> BlockExecutor:
        assert self.executor is not None, "the instance has begun"
        return self.executor


def _restore(load, executors: Sequence[BlockExecutor], blocks: Sequence[LoadedBlock]) -> None:
    """Load blocks again that were freed."""
    for executor, block in zip(executors, blocks, strict=True):
        executor.replace([load(block.block, block.precision, block.placement)])


def _with_contents(pages: DividedPool) -> list[int]:
    """Return the pages of which any member has contents to keep."""
    return sorted({page for side in pages.sides for page in side.occupied})
