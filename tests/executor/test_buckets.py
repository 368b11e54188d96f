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
