"""What moves between devices when instances are regrouped: a pure function of plans and sizes.

Weights are counted by block, variant and cut: a block has as many cuts as the largest degree of both sides, and a
device of a smaller degree has several of them. A cut that a device has already stays there. Any other comes from a
device that has it, or else from the host. KV is counted by page: a merge and a split exchange heads between the devices
at the same place of their members, and otherwise pages are copied from device to device.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxserve.control.plan import InstancePlan, StagePlan
from jaxserve.control.regroup import Kind, kind_of
from jaxserve.control.resources import Resources

Link = tuple[int, int]  # source and target device
Cut = tuple[str, str, int]  # block, precision, number of the cut
EXCHANGED_PAGES = 64  # page groups that are exchanged at once


@dataclass(frozen=True)
class Movement:
    """Bytes that a regroup moves, and what it takes and frees on each device."""

    kept: Mapping[int, int] = field(default_factory=dict)  # device -> bytes of weights that stay on it
    links: Mapping[Link, int] = field(default_factory=dict)  # (source, target) -> bytes of weights and KV
    host: Mapping[int, int] = field(default_factory=dict)  # device -> bytes of weights from the host
    change: Mapping[int, int] = field(default_factory=dict)  # device -> bytes taken afterwards minus before
    peak: Mapping[int, int] = field(default_factory=dict)  # device -> most bytes beside the larger of both sides
    weights_first: bool = True  # weights move before KV; with a split the other way round

    @property
    def bytes_by_link(self) -> int:
        """Bytes that cross links between devices."""
        return sum(self.links.values())

    def seconds(self, link_rate: float, copy_rate: float, memory_rate: float) -> float:
        """Estimate how long a regroup stops its instances.

        Links, copies from the host and copies within a device go on at once, and so do all devices. Rates are bytes/s
        of each link, from the host to each device, and within a device.
        """
        into, out = Counter[int](), Counter[int]()
        for (source, target), size in self.links.items():
            out[source] += size
            into[target] += size
        by_link = max([*into.values(), *out.values(), 0]) / link_rate
        from_host = max(self.host.values(), default=0) / copy_rate
        within = max(self.kept.values(), default=0) / memory_rate
        return by_link + from_host + within


def movement(
    before: Sequence[InstancePlan],
    after: Sequence[InstancePlan],
    resources: Resources,
    live_pages: Mapping[str, int],
    others: Iterable[InstancePlan] = (),
) -> Movement:
    """Return what moves if the instances `after` take the place of `before`.

    `live_pages` are the KV pages in use of each instance of `before`, by name. `others` are instances that stay, whose
    devices have weights too.
    """
    kind = kind_of(before, after)
    kept, host, links, blocks = Counter[int](), Counter[int](), Counter[Link](), Counter[int]()
    largest = max((stage.tp for plan in (*before, *after, *others) for stage in plan.stages), default=1)
    holders = _holders((*before, *others), largest)
    for plan in after:
        for stage in plan.stages:
            _move_weights(stage, largest, holders, resources, kept, host, links, blocks)
    chunk = Counter[int]()
    if kind is not Kind.COPY:
        whole, members = (after[0], before) if kind is Kind.MERGE else (before[0], after)
        pages = live_pages if kind is Kind.MERGE else _even(live_pages.get(whole.name, 0), members)
        _exchange_heads(members, pages, resources, links, chunk)
    old, new = resources.device_bytes(*before), resources.device_bytes(*after)
    change = {device: new.get(device, 0) - old.get(device, 0) for device in {**old, **new}}
    peak = {device: blocks[device] + chunk[device] for device in {**old, **new}}
    return Movement(dict(kept), dict(links), dict(host), change, peak, weights_first=kind is not Kind.SPLIT)


def _holders(plans: Iterable[InstancePlan], largest: int) -> dict[Cut, list[int]]:
    """Return the devices that have each cut of each block."""
    holders: dict[Cut, list[int]] = {}
    for plan in plans:
        for stage in plan.stages:
            for block in stage.blocks:
                for place, device in enumerate(stage.devices):
                    for cut in _cuts(place, stage.tp, largest):
                        holders.setdefault((block.block, block.precision, cut), []).append(device)
    return holders


def _cuts(place: int, degree: int, largest: int) -> range:
    """Return the cuts of a shard, if a block has as many cuts as the largest degree."""
    return range(place * largest // degree, (place + 1) * largest // degree)


def _move_weights(
    stage: StagePlan,
    largest: int,
    holders: Mapping[Cut, Sequence[int]],
    resources: Resources,
    kept: Counter[int],
    host: Counter[int],
    links: Counter[Link],
    blocks: Counter[int],
) -> None:
    """Count what the weights of a new stage move, and the bytes of its largest block on each device (`blocks`)."""
    for block in stage.blocks:
        size = resources.sizes.block(block.block, block.precision, stage.tp)
        for place, device in enumerate(stage.devices):
            cuts = _cuts(place, stage.tp, largest)
            for cut in cuts:
                sources = holders.get((block.block, block.precision, cut), ())
                if device in sources:
                    kept[device] += size // len(cuts)
                elif sources:
                    links[sources[0], device] += size // len(cuts)
                else:
                    host[device] += size // len(cuts)
            blocks[device] = max(blocks[device], size)


def _exchange_heads(
    members: Sequence[InstancePlan],
    pages: Mapping[str, int],
    resources: Resources,
    links: Counter[Link],
    chunk: Counter[int],
) -> None:
    """Count what the members' devices exchange. `pages`: live pages of each member, which all of them end up with."""
    groups = max((pages.get(member.name, 0) for member in members), default=0)
    count = len(members)
    for index in range(len(members[0].stages)):
        page = resources.page_bytes(members[0].stages[index])
        for devices in zip(*(member.stages[index].devices for member in members), strict=True):
            for source in devices:
                for target in devices:
                    if source != target:
                        links[source, target] += groups * page // count
                chunk[source] = 2 * min(groups, EXCHANGED_PAGES) * page


def _even(pages: int, members: Sequence[InstancePlan]) -> dict[str, int]:
    return {member.name: -(-pages // len(members)) for member in members}
