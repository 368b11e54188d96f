"""The KV pools of instances that come to share their layers, or have them all again, and the exchange of their rows.

No array is copied when instances change: devices trade arrays (`control.lane_moves`), and each gets the label of what
it is to hold. The contents follow row by row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from jax import Array

from jaxserve.control.lane_moves import LaneMove, Trade
from jaxserve.core.block_names import layer_index
from jaxserve.core.step_shapes import smallest_holding
from jaxserve.executor.page_copies import sent_to
from jaxserve.executor.pools import MOVES, Pools, free
from jaxserve.kernels import Pool

Lane = tuple[str, int]  # a layer, and one of the lanes of its pool


@dataclass(frozen=True)
class LanePlace:
    """The place of a lane of each layer's pool: the number of the instance, its pools, and its lane there."""

    instance: int
    pools: Pools
    lane: int


@dataclass(frozen=True)
class Sent:
    """Contents of an instance's rows on their way: for each lane, arrays on the devices that keep it."""

    rows: Sequence[int]
    contents: Mapping[Lane, Sequence[Array]]


class LaneExchange:
    """The exchange between devices after instances have traded arrays."""

    def __init__(self, trades: Sequence[Trade], places: Mapping[int, LanePlace], left: Mapping[Lane, Pool]):
        """`places` has the place of each lane in the new instances. `left` are arrays without a place there."""
        self._places, self._left = places, dict(left)
        self._sources: dict[Lane, Lane | None] = {}  # a lane -> the one whose array has its contents; None: `left`
        for trade in trades:
            move, back = _lane(trade.move), None if trade.back is None else _lane(trade.back)
            self._sources[move] = back
            if back is not None:
                self._sources[back] = move

    @property
    def arrays(self) -> list[Array]:
        """The arrays that are freed in the end."""
        return list(chain.from_iterable(self._left.values()))

    def send(self, instance: int, rows: Sequence[int]) -> Sent:
        """Begin to send rows of an instance to the devices that keep them. Call it between its steps."""
        sources = {lane: source for lane, source in self._sources.items() if self._sender(source) == instance}
        return Sent(tuple(rows), {lane: self._send_lane(lane, source, rows) for lane, source in sources.items()})

    def receive(self, instance: int, sent: Sent) -> None:
        """Write rows that have come for an instance to its pools. Call it between its steps."""
        batches = _batches(sent.rows)
        for (layer, lane), contents in sent.contents.items():
            place, index = self._places[lane], layer_index(layer)
            if place.instance != instance:
                continue
            pool = place.pools.lane(index, place.lane)
            for arrays, ids in zip(contents, batches, strict=True):
                pool = place.pools.programs[index].put(pool, arrays, ids)
            place.pools.set_lane(index, place.lane, pool)

    def close(self) -> None:
        """Free the arrays that no instance has."""
        free(self._left.values())
        self._left.clear()

    def _sender(self, source: Lane | None) -> int:
        """Return the instance between whose steps a lane is read. Nothing writes to the arrays that are left."""
        return 0 if source is None else self._places[source[1]].instance

    def _send_lane(self, target: Lane, source: Lane | None, rows: Sequence[int]) -> list[Array]:
        layer, lane = target
        place = self._places[lane]
        sharding = place.pools[layer_index(layer)][0].sharding
        if source is None:
            pool, programs = self._left[target], place.pools.programs[layer_index(layer)]
        else:
            other, index = self._places[source[1]], layer_index(source[0])
            pool, programs = other.pools.lane(index, other.lane), other.pools.programs[index]
        return [sent_to(programs.take(pool, ids), sharding) for ids in _batches(rows)]


def traded(
    old: Mapping[Lane, Pool], trades: Sequence[Trade], fresh: Mapping[Lane, Pool]
) -> tuple[dict[Lane, Pool], dict[Lane, Pool]]:
    """Return the arrays that each lane has after devices have traded, and those that are left.

    `old` are the arrays of each lane before. `fresh` are new ones for lanes that get none in return.
    """
    new, left = dict(old), {}
    for trade in trades:
        move = _lane(trade.move)
        if trade.back is None:
            left[move], new[move] = old[move], fresh[move]
        else:
            back = _lane(trade.back)
            new[move], new[back] = old[back], old[move]
    return new, left


def interleaved(lanes: Sequence[Pool]) -> Pool:
    """Return the pool that has these lanes."""
    return tuple(chain.from_iterable(zip(*lanes, strict=True)))


def _lane(move: LaneMove) -> Lane:
    return move.layer, move.lane


def _batches(rows: Sequence[int]) -> list[np.ndarray]:
    """Return rows in vectors i32[N] whose lengths programs are compiled for. The last row is repeated as padding."""
    batches = []
    for start in range(0, len(rows), MOVES[-1]):
        part = rows[start : start + MOVES[-1]]
        ids = np.full(smallest_holding(MOVES, len(part)), part[-1], np.int32)
        ids[: len(part)] = part
        batches.append(ids)
    return batches
