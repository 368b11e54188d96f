"""What moves between devices when instances are regrouped: a pure function of plans and sizes.

Weights are counted by block, variant and cut, as `control.shards` shares them: a cut that a device has already stays
there, and any other comes from a device that has it, or else from the host. KV is counted by groups of pages: a merge
and a split exchange heads between the devices at the same place of their members. With other regroups, requests are
copied page by page, and nothing is known in advance.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxserve.control.lane_moves import lane_moves, reverse
from jaxserve.control.plan import InstancePlan, StagePlan
from jaxserve.control.regroup import Kind, kind_of
from jaxserve.control.resources import Resources
from jaxserve.control.shards import ShardSource, shard_sources
from jaxserve.core.block_names import is_layer
from jaxserve.core.numeric import ceil_div

Link = tuple[int, int]  # source and target device
Devices = tuple[int, ...]


@dataclass(frozen=True)
class Movement:
    """Bytes that a regroup moves, and what it takes and frees on each device."""

    kept: Mapping[int, int] = field(default_factory=dict)  # device -> bytes of weights that stay on it
    exchanged: Mapping[int, int] = field(default_factory=dict)  # device -> bytes of KV pages that it reads and writes
    links: Mapping[Link, int] = field(default_factory=dict)  # (source, target) -> bytes of weights and KV
    host: Mapping[int, int] = field(default_factory=dict)  # device -> bytes of weights from the host
    change: Mapping[int, int] = field(default_factory=dict)  # device -> bytes taken afterwards minus before
    peak: Mapping[int, int] = field(default_factory=dict)  # device -> most bytes beside the larger of both sides
    calls: int = 0  # programs that run one after the other
    weights_first: bool = True  # weights move before KV; with a split the other way round
    in_place: bool = False  # weights that stay are not copied

    @property
    def bytes_by_link(self) -> int:
        """Bytes that cross links between devices."""
        return sum(self.links.values())

    def seconds(self, resources: Resources) -> float:
        """Estimate how long the regroup takes at the rates of `resources`.

        All devices work at once. On each of them, copies from other devices, from the host and within its memory follow
        one another. If weights are cut or joined, those that stay are copied too.
        """
        into, out = Counter[int](), Counter[int]()
        for (source, target), size in self.links.items():
            out[source] += size
            into[target] += size
        by_link = max([*into.values(), *out.values(), 0]) / resources.link_rate
        from_host = max(self.host.values(), default=0) / resources.copy_rate
        kept: Mapping[int, int] = {} if self.in_place else self.kept
        devices = {**kept, **self.exchanged}
        within = max((kept.get(d, 0) + self.exchanged.get(d, 0) for d in devices), default=0)
        return by_link + from_host + within / resources.memory_rate + self.calls * resources.link_latency


def movement(
    before: Sequence[InstancePlan],
    after: Sequence[InstancePlan],
    resources: Resources,
    groups: int = 0,
    others: Iterable[InstancePlan] = (),
) -> Movement:
    """Return what moves if the instances `after` take the place of `before`.

    `groups` are the groups of KV pages, one of each member or lane, of which any has contents. `others` are instances
    that stay, whose devices have weights too.
    """
    kind = kind_of(before, after)
    weights = _Weights(resources, before, after, others)
    for plan in after:
        for stage in plan.stages:
            weights.move(stage)
    members = {Kind.MERGE: before, Kind.SPLIT: after}.get(kind, ())
    kv = kv_movement(members, groups, resources)
    if kind in (Kind.DROP, Kind.RESTORE):
        kv = lane_movement(before, after, groups, resources)
    old, new = resources.device_bytes(*before), resources.device_bytes(*after)
    return Movement(
        dict(weights.kept),
        kv.exchanged,
        dict(weights.links + Counter(kv.links)),
        dict(weights.host),
        change={device: new.get(device, 0) - old.get(device, 0) for device in {**old, **new}},
        peak={device: weights.largest[device] + kv.peak.get(device, 0) for device in {**old, **new}},
        calls=weights.calls + kv.calls,
        weights_first=kind is not Kind.SPLIT,
        in_place=kind in (Kind.DROP, Kind.RESTORE),
    )


def kv_movement(members: Sequence[InstancePlan], groups: int, resources: Resources) -> Movement:
    """Return what the KV of instances moves that merge, or into which one splits: see `movement` for `groups`."""
    links, exchanged, chunk, calls = Counter[Link](), Counter[int](), Counter[int](), 0
    if members and groups:
        calls = _exchange_heads(members, groups, resources, links, exchanged, chunk)
    return Movement(exchanged=dict(exchanged), links=dict(links), peak=dict(chunk), calls=calls)


def lane_movement(
    before: Sequence[InstancePlan], after: Sequence[InstancePlan], rows: int, resources: Resources
) -> Movement:
    """Return what the KV moves of instances that share their layers, or have them all again: `rows` of each lane."""
    if len(after) == 1:
        moves, whole = lane_moves(before, after[0]), after[0]
    else:
        moves, whole = reverse(lane_moves(after, before[0])), before[0]
    links, exchanged, chunk = Counter[Link](), Counter[int](), Counter[int]()
    pages = {
        block.block: resources.page_bytes(stage) // sum(is_layer(block.block) for block in stage.blocks)
        for stage in whole.stages
        for block in stage.blocks
    }
    for move in moves:
        for source, target in zip(move.source, move.target, strict=True):
            size = rows * pages[move.layer]
            links[source, target] += size
            exchanged[source] += size
            exchanged[target] += size
            chunk[source] += size
            chunk[target] += size
    return Movement(exchanged=dict(exchanged), links=dict(links), peak=dict(chunk), calls=bool(rows))


class _Weights:
    """What the weights of new instances move, added up stage by stage."""

    def __init__(
        self,
        resources: Resources,
        before: Sequence[InstancePlan],
        after: Sequence[InstancePlan],
        others: Iterable[InstancePlan],
    ):
        self.kept, self.host, self.links = Counter[int](), Counter[int](), Counter[Link]()
        self.largest = Counter[int]()  # device -> bytes of its largest new block
        self.calls = 0
        self._resources = resources
        there = (*before, *others)
        self._cuts = math.lcm(*(stage.tp for plan in (*there, *after) for stage in plan.stages))
        self._copies: dict[tuple[str, str], list[Devices]] = {}  # (block, precision) -> the devices of each copy
        for plan in there:
            for stage in plan.stages:
                for block in stage.blocks:
                    self._copies.setdefault((block.block, block.precision), []).append(stage.devices)
        self._sources: dict[tuple[Devices, tuple[Devices, ...]], list[ShardSource[int]]] = {}

    def move(self, stage: StagePlan) -> None:
        """Count what the weights of a new stage move."""
        self.calls += len(stage.blocks)
        for block in stage.blocks:
            size = self._resources.sizes.block(block.block, block.precision, stage.tp)
            for part in self._sources_of(stage.devices, tuple(self._copies.get((block.block, block.precision), ()))):
                moved = size * stage.tp * (part.last - part.first) // self._cuts
                if part.is_local:
                    self.kept[part.device] += moved
                elif part.source is None:
                    self.host[part.device] += moved
                else:
                    self.links[part.source, part.device] += moved
            for device in stage.devices:
                self.largest[device] = max(self.largest[device], size)

    def _sources_of(self, target: Devices, copies: tuple[Devices, ...]) -> list[ShardSource[int]]:
        """Return where the devices of a stage get their cuts from. Most blocks have copies on the same devices."""
        key = target, copies
        if key not in self._sources:
            self._sources[key] = shard_sources(target, copies, self._cuts)
        return self._sources[key]


def _exchange_heads(
    members: Sequence[InstancePlan],
    groups: int,
    resources: Resources,
    links: Counter[Link],
    exchanged: Counter[int],
    chunk: Counter[int],
) -> int:
    """Count what the members' devices exchange, and return the number of calls."""
    count, calls = len(members), 0
    for index, stage in enumerate(members[0].stages):
        page = resources.page_bytes(stage)
        layers = sum(is_layer(block.block) for block in stage.blocks)
        calls += layers * ceil_div(groups, resources.exchanged_pages)
        for devices in zip(*(member.stages[index].devices for member in members), strict=True):
            for source in devices:
                for target in devices:
                    if source != target:
                        links[source, target] += groups * page // count
                exchanged[source] += groups * page
                chunk[source] = 2 * min(groups, resources.exchanged_pages) * page // max(layers, 1)
    return calls
