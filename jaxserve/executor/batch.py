"""The inputs of one step as a single int32 vector: one transfer from the host, cut apart on the device.

`shapes` says how the vector is laid out. Padding rows have length 0, write to the null page and sample into a spare
slot. Their embeddings are zeros and stay so; native products leave out rows of zeros in front of all others and behind
them. So decode rows are the last of theirs, next to the tiles.
"""

from collections import abc
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.core.numeric import ceil_div
from jaxserve.core.request import Sequence
from jaxserve.core.step_shapes import StepShape
from jaxserve.core.work import Chunk, Work
from jaxserve.kernels import AttentionMeta

View = Callable[[str], np.ndarray]  # a field of the vector by its name

NO_TOKEN = np.iinfo(np.int32).max  # beyond every vocabulary


def unpack(packed: Array, shape: StepShape) -> dict[str, Array]:
    """The fields on the device, by static slices."""
    return {name: jnp.asarray(packed[place]).reshape(size) for name, (place, size) in shape.fields.items()}


def attention_meta(fields: dict[str, Array]) -> AttentionMeta:
    """The kernels' view of a step's fields."""
    return AttentionMeta(*(fields[name] for name in AttentionMeta._fields))


def pack(work: Work, shape: StepShape, page_rows: np.ndarray, page_size: int) -> np.ndarray:
    """The packed vector of a step. `page_rows` is the page table's int32[slots, width].

    A token whose value is still on the device is written as -1 - slot.
    """
    packed = np.zeros(shape.size, np.int32)
    view = partial(shape.view, packed)
    view("tokens")[:] = NO_TOKEN
    view("rows")[:] = shape.tokens  # there is none, so zeros
    if work.decodes:
        _pack_decodes(work.decodes, shape, view, page_rows, page_size)
    tile, row = 0, len(work.decodes)
    for chunk in work.chunks:
        tile = _pack_chunk(chunk, shape, view, page_rows, page_size, tile, row)
        row += 1
    return packed


def _pack_decodes(
    sequences: abc.Sequence[Sequence], shape: StepShape, view: View, page_rows: np.ndarray, page_size: int
) -> None:
    """Writes the rows that decode: the last ones of theirs. Of few numbers lists cost less than arrays."""
    count = len(sequences)
    first, last = shape.decodes - count, shape.decodes
    # A sequence with a second token in flight takes its input from the device.
    view("tokens")[first:last] = [-1 - s.slot if s.num_inflight > 1 else s.tokens[-1] for s in sequences]
    positions = [s.num_computed - 1 for s in sequences]
    view("positions")[first:last] = positions
    slots = [s.slot for s in sequences]
    view("decode_pages")[first:] = page_rows[slots, : shape.width]
    view("slots")[first:last] = [
        page_rows.item(slot, at // page_size) * page_size + at % page_size
        for slot, at in zip(slots, positions, strict=True)
    ]
    view("decode_lengths")[first:] = [s.num_computed for s in sequences]
    view("rows")[:count] = range(first, last)


def _pack_chunk(
    chunk: Chunk, shape: StepShape, view: View, page_rows: np.ndarray, page_size: int, tile: int, row: int
) -> int:
    """Writes one chunk from tile number `tile` on; returns the next free tile."""
    sequence, start, length = chunk.sequence, chunk.start, chunk.length
    tiles = ceil_div(length, shape.tile)
    first = shape.decodes + tile * shape.tile
    positions = np.arange(start, start + length, dtype=np.int32)
    pages = page_rows[sequence.slot, : shape.width]
    view("tokens")[first : first + length] = sequence.tokens[start : start + length]
    view("positions")[first : first + length] = positions
    view("slots")[first : first + length] = pages[positions // page_size] * page_size + positions % page_size
    view("rows")[row] = first + length - 1
    view("tile_pages")[tile : tile + tiles] = pages
    starts = np.arange(tiles, dtype=np.int32) * shape.tile
    view("tile_starts")[tile : tile + tiles] = start + starts
    view("tile_lengths")[tile : tile + tiles] = np.minimum(length - starts, shape.tile)
    return tile + tiles
