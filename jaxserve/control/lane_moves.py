"""Which KV moves between devices when instances share their layers, or have them all again.

The KV of each lane lies on the devices of the member that it comes from, in all layers, and afterwards on the devices
that keep the layer. The way back is the reverse. Two devices trade the arrays of lanes: what one gives up has room for
what it gets, so that the exchange takes no memory but for the rows on their way.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.control.plan import InstancePlan
from jaxserve.control.resources import Resources
from jaxserve.core.block_names import is_layer
from jaxserve.kvcache import JoinedIds

Devices = tuple[int, ...]  # of a stage


@dataclass(frozen=True)
class LaneMove:
    """The move of one lane of a layer's KV pool."""

    layer: str
    lane: int
    source: Devices
    target: Devices


@dataclass(frozen=True)
class Trade:
    """Two moves in opposite directions, or one alone, whose target has no array to give for it."""

    move: LaneMove
    back: LaneMove | None


def lane_moves(members: Sequence[InstancePlan], whole: InstancePlan) -> list[LaneMove]:
    """Return the moves when members share their layers in `whole`."""
    ids = JoinedIds(tuple(member.lanes for member in members))
    keeper = {block.block: stage.devices for stage in whole.stages for block in stage.blocks}
    return [
        LaneMove(block.block, lane, stage.devices, keeper[block.block])
        for member, first in zip(members, ids.first_lanes, strict=True)
        for stage in member.stages
        for block in stage.blocks
        if is_layer(block.block) and keeper[block.block] != stage.devices
        for lane in range(first, first + member.lanes)
    ]


def reverse(moves: Sequence[LaneMove]) -> list[LaneMove]:
    """Return the moves when the members have all layers again."""
    return [LaneMove(move.layer, move.lane, move.target, move.source) for move in moves]


def left_over(moves: Sequence[LaneMove], member: InstancePlan, resources: Resources) -> dict[int, int]:
    """Return the bytes of arrays that devices keep until an exchange is over, because they get none in return.

    `member` is the plan of one of the instances that share their layers, or will have them all again.
    """
    bytes_left: Counter[int] = Counter()
    rows = resources.pages_taken(member.tp, member.kv_pages // member.lanes)
    page = resources.page_bytes(member.stages[0]) // sum(is_layer(block.block) for block in member.stages[0].blocks)
    for trade in trades(moves):
        if trade.back is None:
            bytes_left.update(dict.fromkeys(trade.move.source, rows * page))
    return dict(bytes_left)


def trades(moves: Sequence[LaneMove]) -> list[Trade]:
    """Return all moves, in pairs as far as two devices have moves in both directions."""
    by_way: defaultdict[tuple[Devices, Devices], list[LaneMove]] = defaultdict(list)
    for move in moves:
        by_way[move.source, move.target].append(move)
    made = []
    for (source, target), there in list(by_way.items()):
        back = by_way.get((target, source), [])
        count = min(len(there), len(back))
        if source < target:
            made += [Trade(move, other) for move, other in zip(there, back, strict=False)]
        made += [Trade(move, None) for move in there[count:]]
    return made
