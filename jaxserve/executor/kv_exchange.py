"""The exchange of KV pages between instances that become one with tensor parallelism, and back.

n members of d devices each become one instance of n * d devices: its device j * n + i is device j of member i. Page p
of member i becomes page n * p + i. Before, a device has all of its member's pages, and afterwards the i-th part of the
heads that the j-th devices had, of the pages of all members:

    device j of member i         [P, K/d, ...]       page p: K/d heads
    the same memory, reshaped    [n P, K/(n d), ...] page n p + h: the h-th part of these heads
    after the exchange           [n P, K/(n d), ...] page n p + m: the i-th part of the heads of member m's page p

Only pages with contents are exchanged, a few at a time and in place. The exchange is its own inverse. Pages n p to
n p + n - 1 are a group, which takes memory on all devices if any member uses page p. Segments are exchanged one by one:
a segment begins at n times the page at which the members' segments begin.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.compilation.programs import Program, StartsCompiling
from jaxserve.core.kv_layout import exchanged_pages
from jaxserve.core.step_shapes import smallest_holding
from jaxserve.executor.apart import ApartPlacement
from jaxserve.executor.pools import PoolPrograms, Pools, pages_of
from jaxserve.kernels import Pool
from jaxserve.parallel.placement import POOL_AXES, TP, Placement, assembled, on_device, spec

Held = Mapping[int, list[Array | list[Array]]]  # by layer and segment: the merged array, or the members' arrays


class Kind(Enum):
    """What a program does with the groups that it exchanges and with the whole segment."""

    JOIN = auto()  # from the members' arrays to the merged one
    EXCHANGE = auto()
    PART = auto()  # from the merged array to the members'

    @property
    def inverse(self) -> "Kind":
        """The kind that undoes this one, with the same groups."""
        return {Kind.JOIN: Kind.PART, Kind.EXCHANGE: Kind.EXCHANGE, Kind.PART: Kind.JOIN}[self]


@dataclass(frozen=True)
class Side:
    """The pools of an instance before or after an exchange: the programs of each layer, and the pages of segments."""

    programs: tuple[PoolPrograms, ...]
    sizes: tuple[int, ...]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placement of each layer."""
        return tuple(programs.placement for programs in self.programs)


class KVExchange:
    """Makes the pools of a merged instance from those of its members in place, and the other way round.

    If an exchange fails, what it has done is undone, and the pools are as before.
    """

    def __init__(self, members: Sequence[Side], merged: Side):
        self._members, self._merged = tuple(members), merged
        # Groups that one call exchanges. Padding is moved too, so that few groups have a call of their own.
        self._calls = tuple(sorted({16, 64, exchanged_pages(merged.placements[0].platform)}))
        self._programs = {
            placement: {kind: _program(kind, placement, len(members)) for kind in Kind}
            for placement in merged.placements
        }
        for layer, placement in enumerate(merged.placements):
            for index, member in enumerate(members):
                devices = placement.devices[index :: len(members)]
                assert member.placements[layer].devices == devices, "members take turns in the merged placement"

    def merge(self, pools: Sequence[Pools], pages: Sequence[int]) -> Pools:
        """Return the pools of the merged instance, made of the members' pools, which are empty afterwards.

        `pages` are the pages of which any member has contents to keep; page 0 is none of them.
        """
        segments = self._check([pages_of(own[0]) for own in pools])
        held: Held = {
            layer: [[own[layer][index] for own in pools] for index in range(len(segments))]
            for layer in range(len(self._merged.placements))
        }
        with ExitStack() as undo:
            undo.callback(_give_to_members, pools, held)
            for layer, index, first, rest in self._batches(segments, pages):
                self._run(undo, held, layer, index, Kind.JOIN, first)
                for groups in rest:
                    self._run(undo, held, layer, index, Kind.EXCHANGE, groups)
            merged = self._pools(self._merged, [tuple(own) for own in held.values()])
            undo.pop_all()
        for own in pools:
            own.give_up()
        return merged

    def split(self, pools: Pools, pages: Sequence[int]) -> list[Pools]:
        """Return the pools of the members, made of the merged instance's pools, which are empty afterwards.

        Of each of these `pages` of the members, any page of its group has contents to keep.
        """
        count = len(self._members)
        segments = self._check([tuple(size // count for size in pages_of(pools[0]))])
        held: Held = dict(enumerate(map(list, pools[:])))
        with ExitStack() as undo:
            undo.callback(_give_to_merged, pools, held)
            for layer, index, first, rest in self._batches(segments, pages):
                for groups in rest:
                    self._run(undo, held, layer, index, Kind.EXCHANGE, groups)
                self._run(undo, held, layer, index, Kind.PART, first)
            members = [
                self._pools(member, [tuple(segment[number] for segment in own) for own in held.values()])
                for number, member in enumerate(self._members)
            ]
            undo.pop_all()
        pools.give_up()
        return members

    def join(self, pools: Pools, layer: int, pages: Sequence[int]) -> None:
        """Let a layer that the members of a merged instance run apart have the merged instance's pool, in place.

        `pages` are as in `merge`.
        """
        place, placements = self._apart(layer), [member.placements[layer] for member in self._members]
        parts = place.part_pool(pools[layer], [placement.sharding(POOL_AXES) for placement in placements])
        held: Held = {layer: [list(arrays) for arrays in zip(*parts, strict=True)]}
        with ExitStack() as undo:
            undo.callback(lambda: pools.__setitem__(layer, place.join_pools(list(zip(*held[layer], strict=True)))))
            for _, index, first, rest in self._batches(pages_of(parts[0]), pages, [layer]):
                self._run(undo, held, layer, index, Kind.JOIN, first)
                for groups in rest:
                    self._run(undo, held, layer, index, Kind.EXCHANGE, groups)
            pools[layer] = tuple(held[layer])
            undo.pop_all()

    def part(self, pools: Pools, layer: int, pages: Sequence[int]) -> None:
        """Let the members of a merged instance run a layer apart, each with its pages: the reverse of `join`."""
        count = len(self._members)
        held: Held = {layer: list(pools[layer])}
        with ExitStack() as undo:
            undo.callback(lambda: pools.__setitem__(layer, tuple(held[layer])))
            for _, index, first, rest in self._batches(
                [size // count for size in pages_of(pools[layer])], pages, [layer]
            ):
                for groups in rest:
                    self._run(undo, held, layer, index, Kind.EXCHANGE, groups)
                self._run(undo, held, layer, index, Kind.PART, first)
            pools[layer] = self._apart(layer).join_pools(list(zip(*held[layer], strict=True)))
            undo.pop_all()

    def _apart(self, layer: int) -> ApartPlacement:
        return ApartPlacement(self._merged.placements[layer], len(self._members))

    def compile(self, compiler: StartsCompiling) -> None:
        """Start to compile all programs of exchanges, for all segments that both sides may have."""
        for program, key, arguments in self.calls():
            compiler.compile(program, key, *arguments)

    @property
    def is_warm(self) -> bool:
        """Whether all programs of exchanges are compiled."""
        return all(key in program.executables for program, key, _ in self.calls())

    def _check(self, segments: Sequence[Sequence[int]]) -> Sequence[int]:
        """Return the pages of the members' present segments. Raise ValueError if the sides do not fit."""
        (present, *others), count = segments, len(self._members)
        fit = [
            size
            for size, merged in zip(self._members[0].sizes, self._merged.sizes, strict=False)
            if merged == count * size
        ]
        if any(other != present for other in others) or present != tuple(fit[: len(present)]):
            raise ValueError(
                f"KV pools with segments of {', '.join(map(str, segments))} pages cannot be exchanged: members must "
                f"have equal ones of {self._members[0].sizes}, and the merged instance those of {self._merged.sizes}"
            )
        return present

    def _batches(
        self, segments: Sequence[int], pages: Sequence[int], layers: Iterable[int] | None = None
    ) -> Iterator[tuple[int, int, list[int], list[list[int]]]]:
        """Return for each layer and segment the groups of the first call and of the others, by their own numbers."""
        layers = range(len(self._merged.placements)) if layers is None else layers
        ends = list(accumulate(segments))
        own = [
            sorted(page - end + size for page in set(pages) if end - size <= page < end)
            for end, size in zip(ends, segments, strict=True)
        ]
        small, *_, large = self._calls
        for layer in layers:
            for index, groups in enumerate(own):
                rest = [groups[start : start + large] for start in range(small, len(groups), large)]
                yield layer, index, groups[:small], rest

    def _run(self, undo: ExitStack, held: Held, layer: int, index: int, kind: Kind, groups: Sequence[int]) -> None:
        self._call(held, layer, index, kind, groups)
        undo.callback(self._call, held, layer, index, kind.inverse, groups)

    def _call(self, held: Held, layer: int, index: int, kind: Kind, groups: Sequence[int]) -> None:
        """Run a program on a segment, in place."""
        placement, count = self._merged.placements[layer], len(self._members)
        array = held[layer][index]
        if isinstance(array, list):
            size = array[0].shape[0]
            parts = [on_device(array[number % count], device) for number, device in enumerate(placement.devices)]
            array = assembled(parts, _stacked(placement))
        else:
            size = array.shape[0] // count
        ids = np.full(smallest_holding(self._calls, len(groups)), size, np.int32)
        ids[: len(groups)] = groups
        result = self._programs[placement][kind].at((size, len(ids)))(array, ids)
        if placement.platform == "cpu":
            # XLA has as many threads as devices, and each waits for the others of its program (see `BlockExecutor`).
            jax.block_until_ready(result)
        if kind is Kind.PART:
            held[layer][index] = [
                assembled(
                    [on_device(result, device) for device in member.placements[layer].devices],
                    member.placements[layer].sharding(POOL_AXES),
                )
                for member in self._members
            ]
        else:
            held[layer][index] = result

    def _pools(self, side: Side, pools: Sequence[Pool]) -> Pools:
        return Pools(side.programs, side.sizes, pools)

    def calls(self) -> Iterator[tuple[Program, Hashable, tuple[jax.ShapeDtypeStruct, ...]]]:
        """Return all programs that an exchange may run, with their keys and abstract arguments."""
        count = len(self._members)
        sizes = zip(self._members[0].sizes, self._merged.sizes, strict=False)
        for size in dict.fromkeys(size for size, merged in sizes if merged == count * size):
            for pools in dict.fromkeys(self._merged.programs):
                placement = pools.placement
                programs, (merged,) = self._programs[placement], pools.abstract((count * size,))
                heads, degree = merged.shape[1], len(placement.devices)
                shape = (degree * size, heads * count // degree, *merged.shape[2:])
                stacked = jax.ShapeDtypeStruct(shape, merged.dtype, sharding=_stacked(placement))
                for kind, array, groups in (
                    (Kind.JOIN, stacked, self._calls[:1]),
                    (Kind.EXCHANGE, merged, self._calls),
                    (Kind.PART, merged, self._calls[:1]),
                ):
                    for length in groups:
                        yield programs[kind], (size, length), (array, jax.ShapeDtypeStruct((length,), np.int32))


def _give_to_members(pools: Sequence[Pools], held: Held) -> None:
    for layer, segments in held.items():
        for number, own in enumerate(pools):
            own[layer] = tuple(segment[number] for segment in segments)


def _give_to_merged(pools: Pools, held: Held) -> None:
    for layer, segments in held.items():
        pools[layer] = tuple(segments)


def _stacked(placement: Placement) -> NamedSharding:
    """Return the sharding of an array that consists of each device's part of a member's pool, one after another."""
    return NamedSharding(placement.mesh, PartitionSpec(TP))


def _program(kind: Kind, placement: Placement, members: int) -> Program:
    """Return a program (segment, groups i32[C]) -> segment of a kind, which works in place.

    Groups beyond the segment are padding. XLA would copy the pool for a reshape alone if each device has one head, but
    not if pages are written too. Hence the reshape is a part of the first or the last exchange.
    """
    degree = len(placement.devices) // members
    partners = [[j * members + i for i in range(members)] for j in range(degree)]

    def run(segment: Array, groups: Array) -> Array:
        pages, heads, *page = segment.shape
        if kind is Kind.JOIN:
            segment = segment.reshape(pages * members, heads // members, *page)
        segment = _exchanged(segment, groups, members, partners)
        return segment.reshape(pages // members, heads * members, *page) if kind is Kind.PART else segment

    merged, stacked = spec(POOL_AXES), PartitionSpec(TP)
    before = stacked if kind is Kind.JOIN else merged
    after = stacked if kind is Kind.PART else merged
    on_devices = jax.shard_map(
        run, mesh=placement.mesh, in_specs=(before, PartitionSpec()), out_specs=after, check_vma=False
    )
    sharding = NamedSharding(placement.mesh, after)
    return Program(f"{kind.name} {members}", jax.jit(on_devices, donate_argnums=0, out_shardings=sharding))


def _exchanged(segment: Array, groups: Array, members: int, partners: list[list[int]]) -> Array:
    """Return a device's part of a merged segment, with the pages of some groups exchanged between partners."""
    pages = (groups[:, None] * members + jnp.arange(members, dtype=jnp.int32)).reshape(-1)
    # Padding reads the first page, because reading an unused page of an elastic pool would count as memory in use.
    taken = segment.at[jnp.where(pages < segment.shape[0], pages, 0)].get(mode="clip")
    taken = taken.reshape(-1, members, *segment.shape[1:])
    taken = lax.all_to_all(taken, TP, split_axis=1, concat_axis=1, axis_index_groups=partners, tiled=True)
    return segment.at[pages].set(taken.reshape(-1, *segment.shape[1:]), mode="drop")
