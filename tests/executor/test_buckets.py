"""The step shapes that exist, and the shape that a step gets."""

from dataclasses import replace

import pytest

from jaxserve.core.step_shapes import Buckets


def buckets(seqs: int, *, finer: bool) -> Buckets:
    return Buckets(seqs, max_tiles=4, tile=32, min_rows=1, widths=(8,), finer=finer)


@pytest.mark.parametrize(
    ("seqs", "finer", "sizes"),
    [
        (16, False, (1, 2, 4, 8, 16)),
        (16, True, (1, 2, 4, 6, 8, 12, 16)),
        (5, True, (1, 2, 4, 5)),
        (6, True, (1, 2, 4, 6)),
        (7, True, (1, 2, 4, 6, 7)),
        (1, True, (1,)),
    ],
)
def test_step_shapes_have_few_decode_sizes(seqs: int, finer: bool, sizes: tuple[int, ...]) -> None:
    assert buckets(seqs, finer=finer).decodes == sizes


@pytest.mark.parametrize(
    ("most", "finer", "sizes"),
    [(16, False, (1, 2, 4, 8, 16)), (16, True, (1, 2, 4, 6, 8, 12, 16)), (8, True, (1, 2, 4, 6, 8))],
)
def test_step_shapes_have_few_tile_counts(most: int, finer: bool, sizes: tuple[int, ...]) -> None:
    assert replace(buckets(16, finer=finer), max_tiles=most).tiles == sizes


@pytest.mark.parametrize("finer", [False, True])
@pytest.mark.parametrize("seqs", [1, 3, 6, 20, 32])
def test_every_step_gets_the_smallest_shape_that_holds_it(seqs: int, finer: bool) -> None:
    grid = buckets(seqs, finer=finer)
    shapes = grid.all()
    assert len(shapes) == len(set(shapes))
    for decodes in range(1, seqs + 1):
        shape = grid.shape(decodes, 0, 1)
        assert shape in shapes
        assert shape.decodes == min(n for n in grid.decodes if n >= decodes)
        assert shape.rows >= shape.decodes
    for decodes in (0, 1, seqs):
        for tiles in range(1, 5):
            shape = grid.shape(decodes, tiles, 1)
            assert shape in shapes
            assert decodes <= shape.decodes
            assert tiles <= shape.tiles < 2 * tiles
            assert shape.rows >= decodes + tiles


@pytest.mark.parametrize(("decodes", "chunks", "rows"), [(1, 1, 64), (60, 4, 64), (61, 4, 260), (0, 4, 4)])
def test_steps_with_prefill_sample_a_quarter_of_the_rows_where_few_decode(decodes: int, chunks: int, rows: int) -> None:
    grid = buckets(256, finer=False)
    shape = grid.shape(decodes, 4, 1, chunks)
    assert shape.rows == rows
    assert shape.tokens == (256 if decodes else 0) + 4 * 32, "layers have one shape for any number of sampled rows"
    assert shape in grid.all()
    assert buckets(256, finer=True).shape(max(decodes, 1), 4, 1, chunks).rows == 260


def test_all_shapes_are_those_that_steps_get() -> None:
    grid = buckets(40, finer=False)
    got = {grid.shape(b, n, 1, c) for b in range(41) for n in range(5) for c in range(n > 0, n + 1) if b or n}
    assert got == set(grid.all())
