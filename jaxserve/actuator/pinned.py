"""Variants in pinned host memory, which is never paged out, so that devices read it directly (DMA)."""

import logging
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jaxserve.executor.blocks import Parameter
from jaxserve.executor.executor import BlockExecutor
from jaxserve.parallel.placement import Placement

log = logging.getLogger(__name__)

PINNED = "pinned_host"
# XLA has 64 GB of pinned memory by default on GPU. Other transfers use it too.
MAX_PINNED_BYTES = 48_000_000_000
# A function that returns the kind of host memory in which a device's variants are pinned, or None.
HostMemory = Callable[[jax.Device], str | None]


def pinned_memory(device: jax.Device) -> str | None:
    """Return the kind of a device's pinned memory; None if it has none, or if the host is the device."""
    if device.platform == "cpu":
        return None
    return PINNED if PINNED in {memory.kind for memory in device.addressable_memories()} else None


def pinned_store(executors: Sequence[BlockExecutor], memory: str) -> "PinnedStore | None":
    """Return a store for the instances' variants in a kind of host memory; None, with a warning, if that fails.

    A few bytes are copied as a test. Otherwise an error would appear only at the first change of the plan.
    """
    first, *_ = executors
    routes = {
        (pinned.placement, used.placement)
        for executor in executors
        for pinned, used in zip(first.blocks, executor.blocks, strict=True)
    }
    try:
        for source, target in routes:
            _check_copy(source, target, memory)
    except Exception as error:
        _warn(memory, error)
        return None
    return PinnedStore(first.place, memory)


class PinnedStore:
    """A store of variants in a kind of host memory, split over devices as the first instance's layers are.

    Each device reads its part in one piece, and devices of other instances read the same parts. If pinning fails, or
    would leave too little pinned memory for other transfers, the remaining variants stay in pageable memory.
    """

    def __init__(self, place: Callable[..., Mapping[str, Parameter]], memory: str, max_bytes: int = MAX_PINNED_BYTES):
        """`place` is `BlockExecutor.place` of the first instance. At most `max_bytes` are pinned."""
        self._place, self._memory, self._remaining = place, memory, max_bytes
        self._works = True

    def __call__(self, block: str, parameters: Mapping[str, Parameter], precision: str) -> Mapping[str, Parameter]:
        """Return a variant's parameters in the store's memory, or unchanged if they cannot be pinned."""
        if not self._works:
            return parameters
        try:
            self._remaining -= sum(leaf.nbytes for leaf in jax.tree.leaves(dict(parameters)))
            if self._remaining < 0:
                raise MemoryError("more variants would leave too little pinned memory for transfers")
            pinned = self._place(block, parameters, precision, self._memory)
            jax.block_until_ready(jax.tree.leaves(dict(pinned)))
        except Exception as error:
            self._works = False
            _warn(self._memory, error)
            return parameters
        return pinned


def _check_copy(source: Placement, target: Placement, memory: str) -> None:
    """Copy a few bytes from the host memory of one placement to the devices of another; raise if they do not arrive."""
    sent = np.arange(64 * len(source.devices), dtype=np.int32)
    for axes in (("mlp",), ()):
        array = jax.device_put(sent, source.sharding(axes).with_memory_kind(memory))
        np.testing.assert_array_equal(jax.device_put(array, target.sharding(axes)), sent)


def _warn(memory: str, error: Exception) -> None:
    log.warning("variants stay in pageable memory, not in %s: %s: %s", memory, type(error).__name__, error)
