"""Parameters in the host's memory: pinned for devices with memory of their own, aligned where the host is the device.

Pinned memory is never paged out, so that devices read it directly (DMA). XLA on CPU computes on aligned arrays without
a copy.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jaxserve.core.aligned_arrays import aligned
from jaxserve.parallel.placement import Placement
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
    parts: Mapping[tuple[int | None, ...], np.ndarray]  # by the indices at which a part begins

    @classmethod
    def cut(cls, array: np.ndarray, sharding: NamedSharding) -> "HostShards":
        """Cut an array as a sharding does. Parts that are aligned already are not copied."""
        indices = sharding.devices_indices_map(array.shape).values()
        cuts = {_begin(index): index for index in indices}
        return cls(array.shape, {begin: aligned(array[index]) for begin, index in cuts.items()})

    def on(self, sharding: NamedSharding) -> Array:
        """Return the parts as an array on devices, cut in the same way. Its buffers are the parts themselves."""
        return jax.make_array_from_callback(self.shape, sharding, lambda index: self.parts[_begin(index)])

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())


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
        self, parameters: Mapping[str, Parameter], shardings: Mapping[str, NamedSharding]
    ) -> Mapping[str, Parameter]:
        """Return parameters in pinned memory, split as `shardings` say, or unchanged if they cannot be pinned.

        Each device reads its part in one piece. Devices of other instances read the same parts.
        """
        if not self._works:
            return parameters
        try:
            self._remaining -= sum(leaf.nbytes for leaf in jax.tree.leaves(dict(parameters)))
            if self._remaining < 0:
                raise MemoryError("more variants would leave too little pinned memory for transfers")
            pinned = {
                name: jax.device_put(parameters[name], sharding.with_memory_kind(self._kind))
                for name, sharding in shardings.items()
            }
            return jax.block_until_ready(pinned)
        except Exception as error:
            self._give_up(error)
            return parameters

    def _check_copy(self, source: Placement, target: Placement) -> None:
        sent = np.arange(64 * len(source.devices), dtype=np.int32)
        for axes in (("mlp",), ()):
            array = jax.device_put(sent, source.sharding(axes).with_memory_kind(self._kind))
            np.testing.assert_array_equal(jax.device_put(array, target.sharding(axes)), sent)

    def _give_up(self, error: Exception) -> None:
        self._works = False
        log.warning("variants stay in pageable memory, not in %s: %s: %s", self._kind, type(error).__name__, error)


def _begin(index: tuple[slice, ...]) -> tuple[int | None, ...]:
    return tuple(part.start for part in index)
