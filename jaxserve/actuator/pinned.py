"""Variants in pinned memory of the host: pages that stay where they are, which devices read by themselves (DMA)."""

import logging
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jaxserve.executor.blocks import Parameter
from jaxserve.executor.executor import BlockExecutor
from jaxserve.parallel.placement import Placement

log = logging.getLogger(__name__)

PINNED = "pinned_host"
MOST = 48_000_000_000  # bytes that are kept: of 64 GB (XLA's default on GPU), through which other transfers go too
HostMemory = Callable[[jax.Device], str | None]  # the kind of a device's memory on the host to keep variants in


def pinned_memory(device: jax.Device) -> str | None:
    """Pinned memory where a device has it; None where it has none, or the host is the device."""
    if device.platform == "cpu":
        return None
    return PINNED if PINNED in {memory.kind for memory in device.addressable_memories()} else None


def pinned_store(executors: Sequence[BlockExecutor], memory: str) -> "PinnedStore | None":
    """What keeps variants for these instances in a memory of the host; None, and a warning, where that does not work.

    That is tried with a few bytes: an error would otherwise come with the first change of the plan.
    """
    first, *_ = executors
    ways = {
        (kept.placement, row.placement)
        for executor in executors
        for kept, row in zip(first.blocks, executor.blocks, strict=True)
    }
    try:
        for kept, used in ways:
            _try(kept, used, memory)
    except Exception as error:
        _warn(memory, error)
        return None
    return PinnedStore(first.place, memory)


class PinnedStore:
    """Puts variants into a memory of the host, split as the first instance's rows are: what a device will use lies
    there in one piece, and devices of other instances use the same pieces.

    When that fails, or so much is there that steps could be left without, the rest stays in memory that can be paged.
    """

    def __init__(self, place: Callable[..., Mapping[str, Parameter]], memory: str, most: int = MOST):
        """`place` as `BlockExecutor.place`; `most`: bytes that may be kept."""
        self._place, self._memory, self._left = place, memory, most
        self._works = True

    def __call__(self, block: str, parameters: Mapping[str, Parameter], precision: str) -> Mapping[str, Parameter]:
        """A variant's parameters in the memory, or as they are. Mutates."""
        if not self._works:
            return parameters
        try:
            self._left -= sum(leaf.nbytes for leaf in jax.tree.leaves(dict(parameters)))
            if self._left < 0:
                raise MemoryError("the rest would leave too little of it for transfers")
            kept = self._place(block, parameters, precision, self._memory)
            jax.block_until_ready(jax.tree.leaves(dict(kept)))
        except Exception as error:
            self._works = False
            _warn(self._memory, error)
            return parameters
        return kept


def _try(kept: Placement, used: Placement, memory: str) -> None:
    """Copies a little from one placement's memory on the host to another's devices. Raises if it does not arrive."""
    sent = np.arange(64 * len(kept.devices), dtype=np.int32)
    for axes in (("mlp",), ()):
        array = jax.device_put(sent, kept.sharding(axes).with_memory_kind(memory))
        np.testing.assert_array_equal(jax.device_put(array, used.sharding(axes)), sent)


def _warn(memory: str, error: Exception) -> None:
    log.warning("variants are kept in memory that can be paged, not in %s: %s: %s", memory, type(error).__name__, error)
