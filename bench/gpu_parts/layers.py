"""Layers that are made on the device, because the host makes random numbers slowly."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.executor.block_store import BlockStore


@contextlib.contextmanager
def copied_layers() -> Iterator[None]:
    """Let the layers of models that are loaded inside be copies of the first one, made on the device.

    The library has no public way to do so: this replaces a private method.
    """
    make, first = BlockStore._make, {}
    copy = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + jnp.zeros((), leaf.dtype), tree))

    def made(self: BlockStore, key: Any, *rest: Any) -> Mapping[str, Any]:
        block, *same = key
        if not block.startswith("layers."):
            return make(self, key, *rest)
        if tuple(same) not in first:
            first[tuple(same)] = make(self, key, *rest)
            return first[tuple(same)]
        return copy(dict(first[tuple(same)]))

    BlockStore._make = made  # type: ignore[method-assign]
    try:
        yield
    finally:
        BlockStore._make = make  # type: ignore[method-assign]
