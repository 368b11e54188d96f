"""The inputs of one step as a single int32 vector: one transfer from the host, cut apart on the device.

`shapes` says how the vector is laid out. Padding rows have length 0, write to the null page and sample into a spare
slot. Their embeddings are zeros and stay so; native products leave out rows of zeros in front of all others and behind
them. So decode rows are the last of theirs, next to the tiles.
"""

from math import prod

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.core.work import Work
from jaxserve.executor.shapes import StepShape
from jaxserve.kernels import AttentionMeta

NO_TOKEN = np.iinfo(np.int32).max  # beyond every vocabulary


def unpack(packed: Array, shape: StepShape) -> dict[str, Array]:
    """The fields on the device, by static slices."""
    return {name: jnp.asarray(packed[at : at + prod(size)]).reshape(size) for name, (at, size) in shape.fields.items()}


def attention_meta(fields: dict[str, Array]) -> AttentionMeta:
    """The kernels' view of a step's fields."""
    return AttentionMeta(*(fields[name] for name in AttentionMeta._fields))


def pack(work: Work, shape: StepShape, page_rows: np.ndarray, page_size: int) -> np.ndarray:
    """The packed vector of a step. `page_rows` is the page table's int32[slots, width].

    A token whose value is still on the device is written as -1 - slot.
    """
    packed = np.zeros(shape.size, np.int32)
    view = shape.views(packed)
    view["tokens"][:] = NO_TOKEN
    view["rows"][:] = shape.tokens  # there is none, so zeros
    if work.decodes:
        _pack_decodes(work, shape.decodes - len(work.decodes), view, page_rows, page_size)
    tile, row = 0, len(work.decodes)
    for chunk in work.chunks:
        tile = _pack_chunk(chunk, shape, view, page_rows, page_size, tile, row)
        row += 1
    return packed


def _pack_decodes(work: Work, first: int, view: dict[str, np.ndarray], page_rows: np.ndarray, page_size: int) -> None:
    """Writes the rows that decode, from row `first` on."""
    count = len(work.decodes)
    rows = slice(first, first + count)
    slots = np.fromiter((s.slot for s in work.decodes), np.int32, count)
    # A sequence with a second token in flight takes its input from the device.
    tokens = (-1 - s.slot if s.num_inflight > 1 else s.tokens[-1] for s in work.decodes)
    view["tokens"][rows] = np.fromiter(tokens, np.int32, count)
    positions = np.fromiter((s.num_computed - 1 for s in work.decodes), np.int32, count)
    view["positions"][rows] = positions
    pages = page_rows[slots, : view["decode_pages"].shape[1]]
    view["decode_pages"][rows] = pages
    view["decode_lengths"][rows] = positions + 1
    view["slots"][rows] = pages[np.arange(count), positions // page_size] * page_size + positions % page_size
    view["rows"][:count] = np.arange(first, first + count)


def _pack_chunk(chunk, shape: StepShape, view, page_rows: np.ndarray, page_size: int, tile: int, row: int) -> int:
    """Writes one chunk from tile number `tile` on; returns the next free tile."""
    sequence, start, length = chunk.sequence, chunk.start, chunk.length
    tiles = -(-length // shape.tile)
    first = shape.decodes + tile * shape.tile
    positions = np.arange(start, start + length, dtype=np.int32)
    pages = page_rows[sequence.slot, : shape.width]
    view["tokens"][first : first + length] = sequence.tokens[start : start + length]
    view["positions"][first : first + length] = positions
    view["slots"][first : first + length] = pages[positions // page_size] * page_size + positions % page_size
    view["rows"][row] = first + length - 1
    view["tile_pages"][tile : tile + tiles] = pages
    starts = np.arange(tiles, dtype=np.int32) * shape.tile
    view["tile_starts"][tile : tile + tiles] = start + starts
    view["tile_lengths"][tile : tile + tiles] = np.minimum(length - starts, shape.tile)
    return tile + tiles
