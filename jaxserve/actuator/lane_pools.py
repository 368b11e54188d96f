"""The KV pools of a group of instances, made of the arrays of its members, and the way back.

Devices trade arrays (`control.lane_moves`), and the contents follow (`executor.lane_exchange`). The pools of the
instances that end give their arrays up.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import chain

from jaxserve.actuator.maker import InstanceMaker
from jaxserve.control.lane_moves import Trade
from jaxserve.control.plan import InstancePlan
from jaxserve.core.block_names import layer_index, layer_name
from jaxserve.executor.executor import BlockExecutor
from jaxserve.executor.lane_exchange import Lane, LaneExchange, LanePlace, interleaved, traded
from jaxserve.executor.pools import Pools, free, pages_of
from jaxserve.kernels import Pool


def joined_lanes(
    maker: InstanceMaker, members: Sequence[BlockExecutor], trades: Sequence[Trade], plan: InstancePlan, undo: ExitStack
) -> tuple[Pools, LaneExchange]:
    """Return the pools of the group that members become, with all pages of its plan, and the exchange of contents."""
    old = _equally_long(_lanes_of([member.pools for member in members]), members, undo)
    new, left = traded(old, trades, _fresh(maker, old, trades, [plan], undo))
    side, lanes = maker.side(plan), range(plan.lanes)
    layers = [[new[layer_name(layer), lane] for lane in lanes] for layer in range(len(side.programs))]
    pools = Pools(side.programs, side.sizes, list(map(interleaved, layers)), lanes=plan.lanes)
    growth = pools.prepare(plan.kv_pages)
    undo.callback(free, list(growth))
    pools.extend(growth)
    _give_up(members, undo)
    return pools, LaneExchange(trades, {lane: LanePlace(0, pools, lane) for lane in lanes}, left)


def parted_lanes(
    maker: InstanceMaker, whole: BlockExecutor, trades: Sequence[Trade], plans: Sequence[InstancePlan], undo: ExitStack
) -> tuple[list[Pools], LaneExchange]:
    """Return the pools of the instances that a group becomes, and the exchange of contents."""
    old = _lanes_of([whole.pools])
    new, left = traded(old, trades, _fresh(maker, old, trades, plans, undo))
    pools = [
        Pools(side.programs, side.sizes, [new[layer_name(layer), lane] for layer in range(len(side.programs))])
        for lane, side in enumerate(map(maker.side, plans))
    ]
    _give_up([whole], undo)
    return pools, LaneExchange(trades, {lane: LanePlace(lane, own, 0) for lane, own in enumerate(pools)}, left)


def _lanes_of(pools: Sequence[Pools]) -> dict[Lane, Pool]:
    """Return the arrays of each lane of instances, numbered one instance after another."""
    lanes = ((own, lane) for own in pools for lane in range(own.lanes.count))
    return {
        (layer_name(layer), number): own.lane(layer, lane)
        for number, (own, lane) in enumerate(lanes)
        for layer in range(len(own))
    }


def _equally_long(lanes: Mapping[Lane, Pool], executors: Sequence[BlockExecutor], undo: ExitStack) -> dict[Lane, Pool]:
    """Return lanes of which all have as many segments as the longest, with new ones if need be."""
    pools = [executor.pools for executor in executors for _ in range(executor.pools.lanes.count)]
    sizes, count = executors[0].pools.sizes, max(map(len, lanes.values()))
    longer: dict[Lane, Pool] = {}
    for (layer, lane), pool in lanes.items():
        make = pools[lane].programs[layer_index(layer)].make
        more = tuple(chain.from_iterable(make(size) for size in sizes[len(pool) : count]))
        undo.callback(free, [more])
        longer[layer, lane] = pool + more
    return longer


def _fresh(
    maker: InstanceMaker,
    old: Mapping[Lane, Pool],
    trades: Sequence[Trade],
    plans: Sequence[InstancePlan],
    undo: ExitStack,
) -> dict[Lane, Pool]:
    """Return new arrays for the lanes that get none in return."""
    fresh: dict[Lane, Pool] = {}
    for trade in trades:
        if trade.back is None:
            lane = trade.move.layer, trade.move.lane
            plan = plans[0] if len(plans) == 1 else plans[trade.move.lane]
            programs = maker.side(plan).programs[layer_index(trade.move.layer)]
            fresh[lane] = tuple(chain.from_iterable(programs.make(size) for size in pages_of(old[lane])))
            undo.callback(free, [fresh[lane]])
    return fresh


def _give_up(executors: Sequence[BlockExecutor], undo: ExitStack) -> None:
    """Let the arrays of pools belong to others."""
    for executor in executors:
        arrays = executor.pools[:]
        executor.pools.give_up()
        undo.callback(executor.pools.__setitem__, slice(None), arrays)
