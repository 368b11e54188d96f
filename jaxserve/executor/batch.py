"""The inputs of one step as a single int32 vector, so that a step needs one transfer from the host.

The layout of the vector is `core.step_shapes.StepShape.fields`. Padding rows have length 0, write to the null page and
sample into a spare slot. Their embeddings are zeros and stay zeros. Native products skip rows of zeros at the beginning
and at the end, so the padding of decode rows comes first and the decoding sequences lie next to the tiles.
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

View = Callable[[str], np.ndarray]  # the field of the vector with a name

NO_TOKEN = np.iinfo(np.int32).max  # outside every vocabulary


def unpack(packed: Array, shape: StepShape) -> dict[str, Array]:
    """Return the fields of a packed vector, by static slices."""
    return {name: jnp.asarray(packed[place]).reshape(size) for name, (place, size) in shape.fields.items()}


def attention_meta(fields: dict[str, Array]) -> AttentionMeta:
    """Return the fields that the attention kernels take."""
    return AttentionMeta(*(fields[name] for name in AttentionMeta._fields))


def pack(work: Work, shape: StepShape, page_rows: np.ndarray, page_size: int) -> np.ndarray:
    """Return the packed vector of a step. `page_rows` is the page table int32[slots, width].

    A token whose value is still on the device is written as -1 - slot.
    """
    packed = np.zeros(shape.size, np.int32)
    view = partial(shape.view, packed)
    view("tokens")[:] = NO_TOKEN
    view("rows")[:] = shape.tokens  # out of range, which the head reads as zeros
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
    """Write the decode rows, at the end of their range. For few numbers lists cost less than arrays."""
    count = len(sequences)
    first, last = shape.decodes - count, shape.decodes
    # A sequence with a second token in flight takes its input from the device.
    view("tokens")[first:last] = [
        -1 - s.slot if s.num_inflight - s.num_known_inflight > 1 else s.tokens[-1] for s in sequences
    ]
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
    """Write one chunk from tile `tile` on, and return the next free tile."""
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
