"""How many KV pages an engine starts with, how many it may grow to, and what follows for its instances.

Imports no JAX, so that the simulator divides the memory of simulated devices by the same code.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from jaxserve.control.degree_limits import DegreeLimits
from jaxserve.control.groups import grouped_plan
from jaxserve.control.plan import InstancePlan
from jaxserve.control.resources import Resources
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.kv_layout import segments_for
from jaxserve.core.numeric import ceil_div
from jaxserve.planning.rooms import Room, check_pools, check_room, rooms_of
from jaxserve.planning.spec import EngineSpec, changes_layers, max_lanes

log = logging.getLogger(__name__)

# Share of its KV pages that an instance may lose because its pools take whole segments, whatever its degree is.
SEGMENT_LOSS = 0.02


def with_kv_pages(spec: EngineSpec, limits: Resources) -> Resources:
    """Return the limits, in which nothing is known about KV pages yet, with those of instances of every degree.

    Raise `MemoryBudgetError` if the budget is too small, `ConfigError` if the configuration contradicts itself.
    """
    config, granule = spec.config, limits.granule
    rooms = rooms_of(spec.plan.instances, limits)
    merged = [_Merged.of(spec, limits, degree) for degree in config.degrees.larger()]
    groups = [_Merged.group_of(spec, limits, rooms, lanes) for lanes in range(2, _max_lanes(spec) + 1)]
    min_pages = _check_rooms(spec, rooms, merged)
    starts = [*rooms, *(each.for_members for each in merged)]  # pages at the start must fit before and after a merge
    pages, reserved = _start_and_reserved(spec, rooms, starts)
    taken = max(sum(room.entries.values()) + pages * room.page + room.pools * granule for room in rooms)
    usable = {each: each.usable(spec, reserved, taken) for each in (*merged, *groups)}
    if granule:
        segments: tuple[int, ...] = (max(reserved, *(ceil_div(most[-1], m.members) for m, most in usable.items()), 0),)
        if config.kv_pages is None and any(room.pool_bytes(pages, segments, granule) > room.free for room in starts):
            # Each pool may take up to one granule more than its pages.
            pages = max(min_pages, min((room.free - room.pools * granule) // room.page for room in starts))
        max_pages = reserved
    else:
        fitting = min((room.free + room.freeable) // room.page for room in rooms)
        segments = segments_for(pages, max(pages, min(reserved, fitting)))
        max_pages = sum(segments)
        segments = _with_ends(segments, [most // m.members for m, pages in usable.items() for most in pages])
    check_pools(starts, pages, segments, granule)
    limits = replace(limits, max_pages=max_pages, segments=() if granule else segments, start_pages=pages)
    if not usable:
        max_len = _max_model_len(spec, pages)
        return replace(limits, min_pages=_pages_of(max_len, config), max_len=max_len)
    fitting = {each: min(most[-1], each.members * sum(segments)) for each, most in usable.items()}
    most = {config.tp: max_pages} | {each.degree: max(fitting[each], each.members * max_pages) for each in merged}
    limits = _with_degrees(spec, limits, most, sum(segments))
    of_groups = [
        group_limits(limits.degrees[0], each.members, max(fitting[each], each.members * max_pages)) for each in groups
    ]
    return replace(limits, degrees=(*limits.degrees, *of_groups))


def within_start(config: EngineConfig, instances: Sequence[InstancePlan], limits: Resources) -> Resources:
    """Return the limits of plans, in which pages grow only by what smaller weights free if the user chose the pages.

    `instances` are those of the start.
    """
    if config.kv_pages is None or config.max_kv_pages is not None:
        return limits
    return replace(limits, budget=max(limits.device_bytes(*instances).values()))


def of_degree(instance: InstancePlan, degree: int) -> InstancePlan:
    """Return the plan of an instance of one stage on the first `degree` devices."""
    (stage,) = instance.stages
    return replace(instance, stages=(replace(stage, devices=tuple(range(degree))),))


@dataclass(frozen=True, eq=False)
class _Merged:
    """An instance that others are merged to, or that shares their layers, alone on its devices."""

    degree: int
    members: int  # instances of the start
    room: Room  # on each device, or on the one with room for the fewest pages

    @classmethod
    def of(cls, spec: EngineSpec, limits: Resources, degree: int) -> "_Merged":
        instance = of_degree(spec.plan.instances[0], degree)
        return cls(degree, spec.config.degrees.members(degree), rooms_of((instance,), limits)[0])

    @classmethod
    def group_of(cls, spec: EngineSpec, limits: Resources, rooms: Sequence[Room], lanes: int) -> "_Merged":
        pages = max(1, min(room.free // room.page for room in rooms))
        members = [instance.with_kv_pages(pages) for instance in spec.plan.instances[:lanes]]
        whole = grouped_plan(members, "", limits)
        # Nothing is known about pages yet, those of several lanes included.
        bare = replace(whole, stages=tuple(replace(stage, kv_pages=0, lanes=1) for stage in whole.stages))
        under_way = {
            device: {"exchange": limits.sizes.entries(stage)["exchange"]}
            for stage in whole.stages
            for device in stage.devices
        }
        of_stages = [
            replace(each, entries={**each.entries, **under_way[each.device]}) for each in rooms_of((bare,), limits)
        ]
        return cls(spec.config.tp, lanes, min(of_stages, key=lambda room: room.free // room.page))

    @property
    def for_members(self) -> Room:
        """The room in units of the pages that all members have together, one of each."""
        return replace(self.room, page=self.members * self.room.page)

    def usable(self, spec: EngineSpec, reserved: int, taken: int) -> list[int]:
        """Return the KV pages that fit besides the layers as they are at the start, and besides the smallest layers.

        The second number is left out if no policy changes layers. `reserved` are the pages that an instance of the
        start may grow to. If the user chose its pages, pages grow only by what a merge frees of the bytes `taken`.
        """
        config = spec.config
        useful, spare = _useful_pages(spec, self.members), self.room.free
        if config.max_kv_pages is not None:
            useful = self.members * reserved
        elif config.kv_pages is not None:
            spare -= self.room.budget - taken
        fitting = [spare, spare + self.room.freeable] if changes_layers(config) else [spare]
        return [min(useful, size // self.room.page) for size in fitting]


def _with_degrees(spec: EngineSpec, limits: Resources, most: Mapping[int, int], room: int) -> Resources:
    """Return the limits with those of every degree. `most` are the KV pages that a plan of the degree may have.

    `room` are the pages that the pools of an instance of the start can ever hold.

    Raise `ConfigError` if the user wants longer sequences than an instance of the largest degree holds.
    """
    config, degrees = spec.config, spec.config.degrees
    of_degrees = [
        DegreeLimits(
            degree,
            max_len=0,
            min_pages=0,
            max_pages=pages,
            start_pages=degrees.members(degree) * limits.start_pages,
            room=degrees.members(degree) * room,
            segments=tuple(degrees.members(degree) * pages for pages in limits.segments),
            shapes=limits.shapes.times(degrees.members(degree)),
        )
        for degree, pages in most.items()
    ]
    limits = replace(limits, degrees=tuple(of_degrees))
    first = spec.plan.instances[0]
    starts = [instance.with_kv_pages(limits.start_pages) for instance in spec.plan.instances]
    within = within_start(config, starts, limits)
    pages = {degree: within.kv_capacity(of_degree(first, degree)) for degree in degrees.larger()}
    pages = {degrees.tp: limits.start_pages} | pages
    _max_model_len(spec, pages[degrees.max_tp])
    lengths = {degree: min(spec.wanted_len, (count - 1) * config.page_size) for degree, count in pages.items()}
    return replace(
        limits,
        min_pages=_pages_of(lengths[degrees.tp], config),
        max_len=lengths[degrees.tp],
        degrees=tuple(
            replace(each, max_len=lengths[each.tp], min_pages=_pages_of(lengths[each.tp], config))
            for each in of_degrees
        ),
    )


def _max_lanes(spec: EngineSpec) -> int:
    return max_lanes(spec.config, len(spec.plan.instances[0].layer_precisions))


def group_limits(member: DegreeLimits, lanes: int, pages: int) -> DegreeLimits:
    """Return the limits of groups of instances with the limits of `member`, which have at most these KV pages.

    They promise to hold sequences as long as each of their members.
    """
    return replace(
        member,
        lanes=lanes,
        max_pages=pages // lanes * lanes,
        start_pages=lanes * member.start_pages,
        room=lanes * member.room,
        segments=tuple(lanes * pages for pages in member.segments),
    )


def _with_ends(segments: tuple[int, ...], ends: Sequence[int]) -> tuple[int, ...]:
    """Return segments that also end at `ends`, so that pools of larger degrees are filled by whole segments too.

    An end that lies just behind another one is left out, and so is one of those that make growth finer if it is close
    to another one: each segment needs programs of its own.
    """
    if not ends:
        return segments
    first, *between = accumulate(segments)
    kept = [first, *between[-1:]]
    for end in sorted(ends):
        below = max((other for other in kept if other <= end), default=end)
        if end - below > SEGMENT_LOSS * end:
            kept.append(end)
    kept += [end for end in between[:-1] if all(abs(end - other) > SEGMENT_LOSS * end for other in kept)]
    kept.sort()
    return (first, *(end - start for start, end in pairwise(kept)))


def _useful_pages(spec: EngineSpec, members: int) -> int:
    """Return the KV pages that the sequences of an instance can use, which takes the place of `members` instances."""
    slots = spec.buckets.times(members).max_num_seqs
    return slots * ceil_div(spec.wanted_len, spec.config.page_size) + 1


def _pages_of(length: int, config: EngineConfig) -> int:
    """Return the KV pages of a sequence of this many tokens, and the null page."""
    return ceil_div(length, config.page_size) + 1


def _start_and_reserved(spec: EngineSpec, rooms: Sequence[Room], starts: Sequence[Room]) -> tuple[int, int]:
    """Return the KV pages at the start and those that an instance may grow to, with the null page.

    Unless the user asks for more, there are at most as many pages as `max_num_seqs` sequences can use. All devices have
    the same pages, as many as the fullest one has room for; at the start, every one of `starts` has room for them.
    """
    config, useful = spec.config, _useful_pages(spec, 1)
    pages, reserved = _pages_and_max_pages(config, min(useful, *(room.free // room.page for room in starts)))
    if config.max_kv_pages is None and changes_layers(config):
        reserved = max(reserved, min(useful, _most_pages(config, rooms, pages)))
    return pages, reserved


def _pages_and_max_pages(config: EngineConfig, fitting: int) -> tuple[int, int]:
    """Return (KV pages at the start, KV pages to have room for), both with the null page; `fitting` fit the budget."""
    pages = fitting if config.kv_pages is None else config.kv_pages + 1
    if config.max_kv_pages is None:
        return pages, pages
    if config.kv_pages is not None and config.max_kv_pages < config.kv_pages:
        raise ConfigError(f"max_kv_pages is {config.max_kv_pages}: it must be at least kv_pages ({config.kv_pages})")
    reserved = config.max_kv_pages + 1
    return min(pages, reserved), reserved


def _most_pages(config: EngineConfig, rooms: Sequence[Room], pages: int) -> int:
    """Return the KV pages that fit next to the smallest layers, for a policy that starts with `pages`.

    If the user chose the pages at the start, only what the layers free becomes pages.
    """
    if config.kv_pages is not None:
        return pages + min(room.freeable // room.page for room in rooms)
    return min((room.free + room.freeable) // room.page for room in rooms)


def _max_model_len(spec: EngineSpec, pages: int) -> int:
    """Return the tokens of the longest sequence: what the user asks for, or what the KV pages hold if that is less.

    Raise `ConfigError` if the user gave a number and the pages hold less.
    """
    config, wanted_len = spec.config, spec.wanted_len
    max_len = min(wanted_len, (pages - 1) * config.page_size)
    if config.max_model_len is not None and max_len < wanted_len:
        raise ConfigError(
            f"max_model_len is {wanted_len}: it must be at most {max_len}, the tokens in {pages - 1} KV pages of "
            f"{config.page_size} tokens (kv_pages)"
        )
    if max_len < wanted_len:
        log.warning("max_model_len is lowered from %d to the %d tokens that the memory holds", wanted_len, max_len)
    return max_len


# -- what does not fit


def _check_rooms(spec: EngineSpec, rooms: Sequence[Room], merged: Sequence[_Merged]) -> int:
    """Return the fewest KV pages that an instance of the start can have.

    Raise `MemoryBudgetError` if the memory budget has no room for them, or for the longest sequence at any degree.
    """
    config = spec.config
    longest = 2 if config.max_model_len is None else _pages_of(config.max_model_len, config)
    for each in merged:
        check_room(each.room, longest if each.degree == config.degrees.max_tp else 2, spec)
    min_pages = 2 if merged else longest  # a longer sequence waits until instances have merged
    for room in rooms:
        check_room(room, min_pages, spec)
    return min_pages
