"""Blocks that are needed again while serving, held in the host's memory for all instances."""

import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding

from jaxserve.core.block_names import is_layer
from jaxserve.core.precision import BITS
from jaxserve.executor.host_memory import HostShards, Parameter, PinnedMemory

Variant = Mapping[str, Any]  # parameters by name, whose arrays are host or pinned arrays, or `HostShards`


class HeldVariants:
    """Blocks in the precisions in which they are needed again, each read or rounded once. Thread-safe.

    These are the variants that decoder layers may change to, and all blocks if devices may lose some of them.
    Where the host is the device, layers run on the held arrays, which are therefore cut as devices share them.
    Instances of different degrees need different cuts of the same arrays. What is contiguous in memory is not copied
    for another cut, and `drop` gives up a cut that nobody uses.
    """

    def __init__(
        self,
        read: Callable[[str, str], Mapping[str, Parameter]],
        precisions: Collection[str],
        *,
        host_is_device: bool,
        pinned: PinnedMemory | None,
        max_degree: int,
        all_blocks: bool = False,
    ):
        """Take a function that reads a block from the checkpoint, and the precisions that layers may change to.

        With `all_blocks`, every block is held in any precision, unless the host is the device.
        """
        self._read, self._precisions, self._all_blocks = read, frozenset(precisions), all_blocks
        self._host_is_device, self._pinned, self._max_degree = host_is_device, pinned, max_degree
        self._held: dict[tuple[str, str], dict[int, Variant]] = {}  # by block and precision; by degree
        self._reading = threading.Lock()  # while a variant is read or cut
        self._lock = threading.Lock()  # for the mapping

    def holds(self, block: str, precision: str) -> bool:
        """Return whether a block is held in a precision, from its first use on."""
        changes = is_layer(block) and precision in self._precisions
        return changes and precision in BITS if self._host_is_device else changes or self._all_blocks

    def get(self, block: str, precision: str, shardings: Mapping[str, NamedSharding]) -> Variant:
        """Return a variant for devices that share it as `shardings` say. It is read now if this is its first use."""
        degree = next(iter(shardings.values())).mesh.size if self._host_is_device else 1
        with self._reading:
            cuts = self.cuts(block, precision)
            if degree not in cuts:
                cuts[degree] = self._make(block, precision, shardings, cuts)
                with self._lock:
                    self._held.setdefault((block, precision), {})[degree] = cuts[degree]
            return cuts[degree]

    def cuts(self, block: str, precision: str) -> dict[int, Variant]:
        """Return what is held of a variant, by degree."""
        with self._lock:
            return dict(self._held.get((block, precision), {}))

    def renew(self, block: str, precision: str, shardings: Mapping[str, NamedSharding]) -> None:
        """Read a variant again, and hold it as devices share it that have these shardings. Other cuts are given up."""
        with self._reading:
            degree = next(iter(shardings.values())).mesh.size if self._host_is_device else 1
            made = self._make(block, precision, shardings, {})
            with self._lock:
                self._held[block, precision] = {degree: made}

    def drop(self, block: str, precision: str, degree: int) -> bool:
        """Give up the cut for a degree, unless it is the only one. Return whether it was given up."""
        with self._lock:
            cuts = self._held[block, precision]
            return len(cuts) > 1 and cuts.pop(degree, None) is not None

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """The block and precision of each variant."""
        with self._lock:
            return tuple(self._held)

    @property
    def nbytes(self) -> int:
        """The bytes of all variants. Cuts for several degrees may lie in the same memory."""
        variants = [dict(variant) for name in self.names for variant in self.cuts(*name).values()]
        leaves = jax.tree.leaves(variants)
        return sum({id(getattr(leaf, "memory", leaf)): leaf.nbytes for leaf in leaves}.values())

    def close(self) -> None:
        """Free the memory."""
        with self._reading, self._lock:
            held, self._held = self._held, {}
        for leaf in jax.tree.leaves([[dict(variant) for variant in cuts.values()] for cuts in held.values()]):
            if isinstance(leaf, Array):
                leaf.delete()

    def _make(
        self, block: str, precision: str, shardings: Mapping[str, NamedSharding], cuts: Mapping[int, Variant]
    ) -> Variant:
        if cuts:
            return _on_leaves(HostShards.cut_again, next(iter(cuts.values())), shardings)
        parameters = self._read(block, precision)
        if self._host_is_device:
            return _on_leaves(HostShards.cut, parameters, shardings)
        return self._pinned.pin(parameters, shardings, self._max_degree) if self._pinned else parameters


def _on_leaves(
    function: Callable[..., Any], parameters: Mapping[str, Any], shardings: Mapping[str, NamedSharding]
) -> Variant:
    return {name: jax.tree.map(partial(function, sharding=s), parameters[name]) for name, s in shardings.items()}
