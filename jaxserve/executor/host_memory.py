"""Parameters in the host's memory: pinned for devices with memory of their own, aligned where the host is the device.

Pinned memory is never paged out, so that devices read it directly (DMA). XLA on CPU computes on aligned arrays without
a copy.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jaxserve.core.aligned_arrays import aligned, aligned_zeros
from jaxserve.parallel.placement import Placement, on_device, split_axis
from jaxserve.quantization import QArray

log = logging.getLogger(__name__)

PINNED = "pinned_host"
# XLA has 64 GB of pinned memory by default on GPU. Other transfers use it too.
MAX_PINNED_BYTES = 48_000_000_000

Parameter = np.ndarray | Array | QArray
# A function that returns the kind of host memory in which a device's variants are pinned, or None.
HostMemory = Callable[[jax.Device], str | None]


def pinned_memory(device: jax.Device) -> str | None:
    """Return the kind of a device's pinned memory; None if it has none, or if the host is the device."""
    if device.platform == "cpu":
        return None
    return PINNED if PINNED in {memory.kind for memory in device.addressable_memories()} else None


@dataclass(frozen=True)
class HostShards:
    """A host array cut into aligned shards, on which virtual devices of the host compute without a copy."""

    shape: tuple[int, ...]
    axis: int | None  # along which it is cut
    parts: tuple[np.ndarray, ...]
    whole: np.ndarray | None  # the array, if the parts lie in its memory

    @classmethod
    def cut(cls, array: np.ndarray, sharding: NamedSharding) -> "HostShards":
        """Cut an array as a sharding does. Parts that are aligned already are not copied."""
        axis = split_axis(sharding)
        count = 1 if axis is None else sharding.mesh.size
        if count == 1 or axis == 0:
            array = aligned(array)  # so that its parts may lie in it
        parts = [aligned(part) for part in np.split(array, count, axis or 0)]
        inside = all(np.may_share_memory(part, array) for part in parts)
        return cls(array.shape, axis, tuple(parts), array if inside else None)

    def cut_again(self, sharding: NamedSharding) -> "HostShards":
        """Return the same array cut as another sharding does. Parts that lie in the array's memory are not copied."""
        if self.whole is not None:
            return HostShards.cut(self.whole, sharding)
        assert self.axis is not None
        starts = np.linspace(0, self.shape[self.axis], sharding.mesh.size + 1).astype(int)
        parts = tuple(self._part(first, last) for first, last in pairwise(starts))
        return HostShards(self.shape, self.axis, parts, parts[0] if len(parts) == 1 else None)

    def on(self, sharding: NamedSharding) -> Array:
        """Return the parts as an array on devices, cut in the same way. Its buffers are the parts themselves."""
        size = self.parts[0].shape[self.axis or 0]

        def part(index: tuple[slice, ...]) -> np.ndarray:
            return self.parts[0 if self.axis is None else (index[self.axis].start or 0) // size]

        return jax.make_array_from_callback(self.shape, sharding, part)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def memory(self) -> object:
        """What tells the memory of the parts from that of other arrays."""
        return self.parts if self.whole is None else self.whole

    def _part(self, first: int, last: int) -> np.ndarray:
        """Return an aligned array of what lies between two positions along the axis."""
        assert self.axis is not None
        shape = (*self.shape[: self.axis], last - first, *self.shape[self.axis + 1 :])
        made, size = aligned_zeros(shape, self.parts[0].dtype), self.parts[0].shape[self.axis]
        before = (slice(None),) * self.axis
        for index, part in enumerate(self.parts):
            begin, end = max(first, index * size), min(last, (index + 1) * size)
            if begin < end:
                own = part[(*before, slice(begin - index * size, end - index * size))]
                np.copyto(made[(*before, slice(begin - first, end - first))], own)
        return made


@partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=[])
@dataclass(frozen=True)
class PinnedShards:
    """An array in pinned memory, in as many parts as the largest number of devices that it is split over."""

    parts: tuple[Array, ...]


HostLeaf = np.ndarray | Array | PinnedShards


def is_pinned(leaf: Any) -> bool:
    """Return whether an array in the host's memory is pinned."""
    return isinstance(leaf, Array | PinnedShards)


def host_parts(leaf: HostLeaf, axis: int | None, cuts: int, first: int, last: int) -> Sequence[np.ndarray | Array]:
    """Return one or several parts that together are the cuts `first` to `last` - 1 of `cuts` along an axis."""
    if isinstance(leaf, PinnedShards):
        return leaf.parts[first:last]
    if isinstance(leaf, Array):  # in pinned memory
        return [on_device(leaf, device) for device in leaf.sharding.mesh.devices[first:last]]
    if axis is None:
        return [aligned(leaf)]
    size = leaf.shape[axis] // cuts
    return [aligned(leaf[(*(slice(None),) * axis, slice(first * size, last * size))])]


class PinnedMemory:
    """A kind of host memory that variants are pinned in, as long as that works.

    If pinning fails, or would leave too little pinned memory for other transfers, the remaining variants stay in
    pageable memory. The log says so once.
    """

    def __init__(self, kind: str, max_bytes: int = MAX_PINNED_BYTES):
        """At most `max_bytes` are pinned."""
        self._kind, self._remaining = kind, max_bytes
        self._works = True

    def check(self, routes: Iterable[tuple[Placement, Placement]]) -> None:
        """Copy a few bytes from the memory of one placement to the devices of another; pin nothing if that fails.

        Otherwise an error would appear only at the first change of the plan.
        """
        try:
            for source, target in routes:
                self._check_copy(source, target)
        except Exception as error:
            self._give_up(error)

    def pin(
        self, parameters: Mapping[str, Parameter], shardings: Mapping[str, NamedSharding], cuts: int = 1
    ) -> Mapping[str, Any]:
        """Return parameters in pinned memory, or unchanged if they cannot be pinned.

        They are split as `shardings` say, or into `cuts` parts if that is more. Each device reads its parts as they
        are. Devices of other instances read the same parts.
        """
        if not self._works:
            return parameters
        try:
            self._remaining -= sum(leaf.nbytes for leaf in jax.tree.leaves(dict(parameters)))
            if self._remaining < 0:
                raise MemoryError("more variants would leave too little pinned memory for transfers")
            pinned = {
                name: jax.tree.map(partial(self._pinned, sharding=sharding, cuts=cuts), parameters[name])
                for name, sharding in shardings.items()
            }
            return jax.block_until_ready(pinned)
        except Exception as error:
            self._give_up(error)
            return parameters

    def _pinned(self, leaf: np.ndarray, sharding: NamedSharding, cuts: int) -> Array | PinnedShards:
        axis, devices = split_axis(sharding), sharding.mesh.devices
        if axis is None or devices.size >= cuts:
            return jax.device_put(leaf, sharding.with_memory_kind(self._kind))
        homes = [Placement((devices[index * devices.size // cuts],)).sharding() for index in range(cuts)]
        parts = zip(np.split(leaf, cuts, axis), homes, strict=True)
        return PinnedShards(tuple(jax.device_put(part, home.with_memory_kind(self._kind)) for part, home in parts))

    def _check_copy(self, source: Placement, target: Placement) -> None:
        sent = np.arange(64 * len(source.devices), dtype=np.int32)
        for axes in (("mlp",), ()):
            array = jax.device_put(sent, source.sharding(axes).with_memory_kind(self._kind))
            np.testing.assert_array_equal(jax.device_put(array, target.sharding(axes)), sent)

    def _give_up(self, error: Exception) -> None:
        self._works = False
        log.warning("variants stay in pageable memory, not in %s: %s: %s", self._kind, type(error).__name__, error)
