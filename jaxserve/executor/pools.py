"""KV pools while the number of pages in use changes: pages move out of the tail, and the tail's memory goes back.

Growing needs nothing of the device: pools have room for all the pages that there may ever be.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.executor.buckets import at_least
from jaxserve.kernels import move_pages, release_pages

MOVES = (16, 128)  # pages that one call moves, and reads into temporary memory; padded with moves of the null page


class PoolResizer:
    """The executables that shrink KV pools in place, one of each kind per sharding; called between two steps."""

    def __init__(self, pools: Sequence[Array]):
        shardings = {pool.sharding for pool in pools}
        self._move = {sharding: _on_each_device(move_pages, sharding, 2) for sharding in shardings}
        self._release = {sharding: _on_each_device(release_pages, sharding, 1) for sharding in shardings}

    def warm(self, pools: list[Array]) -> None:
        """Compiles everything for pools of these shapes by moving the null page and releasing none. Mutates."""
        first = {(pool.sharding, pool.shape): number for number, pool in enumerate(pools)}
        for number in first.values():
            for size in MOVES:
                pools[number] = self._move_batch(pools[number], [(0, 0)] * size)
            pools[number] = self._release_from(pools[number], pools[number].shape[0])

    def shrink(self, pools: list[Array], moves: Mapping[int, int], pages: int) -> None:
        """Copies each page that is a key of `moves` to its value, then gives back the memory of all from `pages` on.

        Dispatches only: steps dispatched before use pages as they were. Mutates.
        """
        pairs, most = list(moves.items()), MOVES[-1]
        for number, pool in enumerate(pools):
            for start in range(0, len(pairs), most):
                pool = self._move_batch(pool, pairs[start : start + most])
            pools[number] = self._release_from(pool, pages)

    def _move_batch(self, pool: Array, pairs: list[tuple[int, int]]) -> Array:
        ids = np.zeros((2, at_least(MOVES, len(pairs))), np.int32)
        ids[:, : len(pairs)] = np.transpose(pairs)
        return self._move[pool.sharding](pool, *ids)

    def _release_from(self, pool: Array, pages: int) -> Array:
        return self._release[pool.sharding](pool, np.array([pages, pool.shape[0]], np.int32))


def _on_each_device(operation: Callable[..., Array], sharding: NamedSharding, operands: int) -> Callable[..., Array]:
    """(pool, operands) -> pool, in place, each device working on its own part of the pool."""
    if sharding.mesh.size > 1:
        whole = (PartitionSpec(),) * operands
        operation = jax.shard_map(
            operation,
            mesh=sharding.mesh,
            in_specs=(sharding.spec, *whole),
            out_specs=sharding.spec,
            check_vma=False,  # custom calls do not say how their outputs vary
        )
    return jax.jit(operation, donate_argnums=0, out_shardings=sharding)
