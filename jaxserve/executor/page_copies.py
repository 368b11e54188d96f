"""Copies of KV pages between the pools of instances on different devices."""

from collections.abc import Hashable, Iterator, Mapping

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jaxserve.compilation.programs import Compiler, Program, abstract
from jaxserve.core.step_shapes import smallest_holding
from jaxserve.executor.pools import MOVES, Pools, pages_of
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


def compile_page_copies(compiler: Compiler, source: Pools, target: Pools) -> None:
    """Start to compile all programs of `copy_pages`, for the present numbers of segments."""
    for program, key, arguments in _calls(source, target):
        compiler.compile(program, key, *arguments)


def page_copies_are_warm(source: Pools, target: Pools) -> bool:
    """Return whether all programs of `copy_pages` are compiled."""
    return all(key in program.executables for program, key, _ in _calls(source, target))


def _copy_batch(source: Pools, target: Pools, layer: int, pairs: list[tuple[int, int]]) -> Array:
    ids = np.zeros((2, smallest_holding(MOVES, len(pairs))), np.int32)  # padded with the null pages
    ids[:, : len(pairs)] = np.transpose(pairs)
    old, new = source[layer], target[layer]
    size = ids.shape[1]
    taken = source.programs.take(old[0].sharding).at((pages_of(old), size))(old, ids[0])
    sent = _sent(taken, new[0].sharding)
    target[layer] = target.programs.put(new[0].sharding).at((pages_of(new), size))(new, sent, ids[1])
    return sent


def _sent(contents: Array, sharding: NamedSharding) -> Array:
    """Return pages on other devices. Between placements of different degrees they go through the host."""
    sources, targets = (list(s.mesh.devices.flat) for s in (contents.sharding, sharding))
    if len(sources) != len(targets):
        return jax.device_put(contents, sharding)
    return assembled(jax.device_put([on_device(contents, device) for device in sources], targets), sharding)


def _calls(source: Pools, target: Pools) -> Iterator[tuple[Program, Hashable, tuple]]:
    """Return all programs that `copy_pages` may run, with their keys and abstract arguments."""
    for layer in range(len(source)):
        old, new = (tuple(map(abstract, pools[layer])) for pools in (source, target))
        for size in MOVES:
            ids = jax.ShapeDtypeStruct((size,), np.int32)
            contents = jax.ShapeDtypeStruct((size, *new[0].shape[1:]), new[0].dtype, sharding=new[0].sharding)
            yield source.programs.take(old[0].sharding), (pages_of(old), size), (old, ids)
            yield target.programs.put(new[0].sharding), (pages_of(new), size), (new, contents, ids)
