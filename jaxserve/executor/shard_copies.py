"""Copies of a block's parameters between devices, from any number of shares to any other.

A device's share is cut out of a larger one that the device holds, is joined from smaller ones of several devices, or
is copied whole (`control.shards`). All copies are real: an array that is assembled from others shares their buffers, so
that freeing one would free the others. Programs run on a single device and take all arrays of a block at once, which is
the cheapest way to dispatch.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.tree_util import PyTreeDef

from jaxserve.compilation.programs import Program, StartsCompiling
from jaxserve.control.shards import ShardSource, shard_sources
from jaxserve.executor.host_memory import HostLeaf, PinnedShards, host_parts, is_pinned
from jaxserve.executor.traffic import Traffic
from jaxserve.parallel.placement import Placement, assembled, on_device, split_axis

DEVICE = "device"  # the kind of a device's own memory
Abstract = jax.ShapeDtypeStruct
Source = ShardSource[jax.Device]
Axes = tuple[int | None, ...]


@dataclass(frozen=True)
class BlockLeaves:
    """The arrays of a block's parameters as a flat list, with the shardings that they have or get."""

    names: tuple[str, ...]
    structures: tuple[PyTreeDef, ...]
    leaves: tuple[Any, ...]
    shardings: tuple[NamedSharding, ...]

    @classmethod
    def of(cls, parameters: Mapping[str, Any], shardings: Mapping[str, NamedSharding]) -> "BlockLeaves":
        """Return the arrays of the parameters that have shardings. Quantised parameters are several arrays."""
        flat = [jax.tree.flatten(parameters[name], is_leaf=is_pinned) for name in shardings]
        return cls(
            tuple(shardings),
            tuple(structure for _, structure in flat),
            tuple(leaf for leaves, _ in flat for leaf in leaves),
            tuple(s for s, (leaves, _) in zip(shardings.values(), flat, strict=True) for _ in leaves),
        )

    def with_leaves(self, leaves: Iterable[Array]) -> dict[str, Any]:
        """Return parameters of the same structure with other arrays."""
        rest = iter(leaves)
        return {
            name: structure.unflatten(islice(rest, structure.num_leaves))
            for name, structure in zip(self.names, self.structures, strict=True)
        }


@dataclass(frozen=True)
class BlockCopy:
    """The arrays of a block on the devices of a placement."""

    placement: Placement
    leaves: tuple[Array, ...]


@dataclass(frozen=True)
class _Group:
    """The arrays of a block that are divided in the same way: all that are split over devices, or all others."""

    indices: tuple[int, ...]
    axes: Axes
    cuts: int

    def sources(self, target: Placement, copies: Sequence[Placement]) -> Iterator[tuple[jax.Device, list[Source]]]:
        """Return the sources of each device's share."""
        found = shard_sources(target.devices, [placement.devices for placement in copies], self.cuts)
        for device, sources in groupby(found, key=lambda source: source.device):
            yield device, list(sources)

    def of(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the arrays of the group among all arrays of a block."""
        return [leaves[index] for index in self.indices]

    def part(self, leaves: Sequence[Abstract], taken: int, device: jax.Device) -> list[Abstract]:
        """Return the abstract arrays of `taken` cuts on a device."""
        shapes = [
            tuple(size * taken // self.cuts if number == axis else size for number, size in enumerate(leaf.shape))
            for leaf, axis in zip(self.of(leaves), self.axes, strict=True)
        ]
        sharding = Placement((device,)).sharding()
        return [
            Abstract(shape, leaf.dtype, sharding=sharding) for shape, leaf in zip(shapes, self.of(leaves), strict=True)
        ]


def is_in_other_parts(parameters: Mapping[str, Any], placement: Placement) -> bool:
    """Return whether parameters in pinned memory are in other parts than the devices of a placement need."""
    return any(
        isinstance(leaf, PinnedShards)
        or (isinstance(leaf, Array) and leaf.sharding.mesh.size != len(placement.devices))
        for leaf in jax.tree.leaves(dict(parameters), is_leaf=is_pinned)
    )


class ShardCopier:
    """Copies blocks to other devices. `cuts` is the largest number of devices that a block is split over."""

    def __init__(self, cuts: int, traffic: Traffic):
        self._cuts, self._traffic = cuts, traffic
        self._programs: dict[str, Program] = {}

    def copy(
        self,
        target: Placement,
        copies: Sequence[BlockCopy],
        shardings: Sequence[NamedSharding],
        host: Callable[[], Sequence[HostLeaf]],
        copied: Callable[[int], None] | None = None,
    ) -> list[Array]:
        """Return a block's arrays on the devices of a target placement, with these shardings.

        They come from existing `copies`, and what these lack comes from the arrays that `host` returns. `copied` is
        called with the bytes of each array after it came from the host or another device, and may wait.
        """
        parts: list[list[Array]] = [[] for _ in shardings]
        for group in self._groups(shardings):
            for device, sources in group.sources(target, [copy.placement for copy in copies]):
                made = self._share(device, sources, copies, group, host, copied)
                for index, array in zip(group.indices, made, strict=True):
                    parts[index].append(array)
        return [assembled(own, sharding) for own, sharding in zip(parts, shardings, strict=True)]

    def calls(
        self,
        leaves: Sequence[Abstract],
        shardings: Sequence[NamedSharding],
        target: Placement,
        copies: Sequence[Placement],
    ) -> Iterator[tuple[Program, Hashable, tuple[Abstract, ...]]]:
        """Return the programs that `copy` runs for a block with these abstract arrays, with their keys and arguments.

        Programs for what comes from the host are left out.
        """
        for group in self._groups(shardings):
            for device, sources in group.sources(target, copies):
                for source in sources:
                    if source.held is not None and source.source is not None and not source.is_whole:
                        begin, end = source.held
                        arrays = group.part(leaves, end - begin, source.source)
                        start = Abstract((), np.int32)
                        yield self._cut(group.axes, source), _key(arrays), (start, *arrays)
                pieces = [group.part(leaves, source.last - source.first, device) for source in sources]
                if len(pieces) > 1:
                    flat = [array for piece in pieces for array in piece]
                    yield self._join(group.axes, len(pieces)), _key(flat), tuple(flat)
                elif sources[0].is_local and sources[0].is_whole:
                    yield self._duplicate, _key(pieces[0]), tuple(pieces[0])

    def compile(self, compiler: StartsCompiling, *arguments: Any) -> None:
        """Start to compile what `copy` runs; the arguments are those of `calls`."""
        for program, key, abstract in self.calls(*arguments):
            compiler.compile(program, key, *abstract)

    def _groups(self, shardings: Sequence[NamedSharding]) -> list[_Group]:
        axes = [split_axis(sharding) for sharding in shardings]
        split = tuple(index for index, axis in enumerate(axes) if axis is not None)
        whole = tuple(index for index, axis in enumerate(axes) if axis is None)
        groups = [_Group(split, tuple(axes[i] for i in split), self._cuts), _Group(whole, (None,) * len(whole), 1)]
        return [group for group in groups if group.indices]

    def _share(
        self,
        device: jax.Device,
        sources: Sequence[Source],
        copies: Sequence[BlockCopy],
        group: _Group,
        host: Callable[[], Sequence[HostLeaf]],
        copied: Callable[[int], None] | None,
    ) -> Sequence[Array]:
        """Return a device's share of the arrays of a group."""
        pieces: list[Sequence[Array]] = []
        for source in sources:
            if source.copy is None:
                pieces += self._from_host(source, group.of(host()), group, copied)
            else:
                pieces.append(self._from_copy(source, group.of(copies[source.copy].leaves), group, copied))
        if len(pieces) > 1:
            flat = [array for piece in pieces for array in piece]
            return self._join(group.axes, len(pieces)).at(_key(flat))(*flat)
        if sources[0].is_local and sources[0].is_whole:
            return self._duplicate.at(_key(pieces[0]))(*pieces[0])
        return pieces[0]

    def _from_copy(
        self, source: Source, leaves: Sequence[Array], group: _Group, copied: Callable[[int], None] | None
    ) -> Sequence[Array]:
        """Return cuts on the device that needs them. They are the source's own arrays if they are there as a whole."""
        assert source.source is not None
        assert source.held is not None
        arrays: Sequence[Array] = [on_device(leaf, source.source) for leaf in leaves]
        if not source.is_whole:
            arrays = self._cut(group.axes, source).at(_key(arrays))(np.int32(source.first - source.held[0]), *arrays)
        self._traffic.count(sum(array.nbytes for array in arrays), source.device, source.source)
        return arrays if source.is_local else _sent(arrays, source.device, copied)

    def _from_host(
        self, source: Source, leaves: Sequence[HostLeaf], group: _Group, copied: Callable[[int], None] | None
    ) -> list[Sequence[Array]]:
        """Return one or several pieces of each array, which a device reads from the host."""
        parts = [
            host_parts(leaf, axis, group.cuts, source.first, source.last)
            for leaf, axis in zip(leaves, group.axes, strict=True)
        ]
        pieces = [_sent(piece, source.device, copied) for piece in zip(*parts, strict=True)]
        self._traffic.count(sum(array.nbytes for piece in pieces for array in piece), source.device, None)
        return pieces

    def _cut(self, axes: Axes, source: Source) -> Program:
        """Return a program (start i32, arrays) -> as many cuts of each as the source gives, from `start` on."""
        assert source.held is not None
        held, taken = source.held[1] - source.held[0], source.last - source.first

        def cut(start: Array, *arrays: Array) -> tuple[Array, ...]:
            sizes = [array.shape[axis] // held for array, axis in zip(arrays, axes, strict=True)]
            return tuple(
                lax.dynamic_slice_in_dim(array, start * size, taken * size, axis)
                for array, axis, size in zip(arrays, axes, sizes, strict=True)
            )

        return self._program(f"cut {taken} of {held} {axes}", cut)

    def _join(self, axes: Axes, count: int) -> Program:
        """Return a program (arrays of the first piece, of the second, ...) -> joined arrays."""

        def join(*arrays: Array) -> tuple[Array, ...]:
            return tuple(jnp.concatenate(arrays[i :: len(axes)], axis) for i, axis in enumerate(axes))

        return self._program(f"join {count} {axes}", join)

    @property
    def _duplicate(self) -> Program:
        return self._program("duplicate", lambda *arrays: tuple(map(jnp.copy, arrays)))

    def _program(self, name: str, function: Callable[..., Any]) -> Program:
        program = self._programs.get(name)  # making one takes a tenth of a millisecond
        return program or self._programs.setdefault(name, Program(name, jax.jit(function)))


def _sent(
    arrays: Sequence[np.ndarray | Array], device: jax.Device, copied: Callable[[int], None] | None
) -> Sequence[Array]:
    """Return arrays on a device that come from elsewhere."""
    there = Placement((device,)).sharding().with_memory_kind(DEVICE)
    if copied is None:
        return jax.device_put(list(arrays), there)
    sent = []
    for array in arrays:
        sent.append(jax.device_put(array, there).block_until_ready())
        copied(sent[-1].nbytes)
    return sent


def _key(arrays: Sequence[Array | Abstract]) -> Hashable:
    """Return what tells executables of a program apart: the device, and the shapes of the arrays."""
    (device,) = arrays[0].sharding.device_set
    return device.id, tuple((array.shape, array.dtype.name) for array in arrays)
