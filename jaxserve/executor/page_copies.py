"""Copies of KV pages between the pools of instances on different devices."""

from collections.abc import Mapping

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jaxserve.core.step_shapes import smallest_holding
from jaxserve.executor.pools import MOVES, Pools
from jaxserve.parallel.placement import assembled, on_device


def copy_pages(source: Pools, target: Pools, pages: Mapping[int, int]) -> None:
    """Copy pages as `pages` (page of the source: page of the target) says, in all layers, from device to device.

    Nothing else in the target changes, and the source stays as it is. Between steps of both instances only.
    """
    pairs, sent = list(pages.items()), None
    for layer in range(len(source)):
        for start in range(0, len(pairs), MOVES[-1]):
            contents = _copy_batch(source, target, layer, pairs[start : start + MOVES[-1]])
            # At most two batches are in temporary memory.
            jax.block_until_ready(sent)
            sent = contents


def _copy_batch(source: Pools, target: Pools, layer: int, pairs: list[tuple[int, int]]) -> Array:
    ids = np.zeros((2, smallest_holding(MOVES, len(pairs))), np.int32)  # padded with the null pages
    ids[:, : len(pairs)] = np.transpose(pairs)
    sent = sent_to(source.take(layer, ids[0]), target[layer][0].sharding)
    target.put(layer, sent, ids[1])
    return sent


def sent_to(contents: Array, sharding: NamedSharding) -> Array:
    """Return pages on other devices. Between placements of different degrees they go through the host."""
    sources, targets = (list(s.mesh.devices.flat) for s in (contents.sharding, sharding))
    if len(sources) != len(targets):
        return jax.device_put(contents, sharding)
    return assembled(jax.device_put([on_device(contents, device) for device in sources], targets), sharding)
