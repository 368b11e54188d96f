"""The layout of a step's packed vector."""

import numpy as np

from jaxserve.core.request import Request, Sequence
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.step_shapes import StepShape
from jaxserve.core.work import Chunk, Work
from jaxserve.executor.batch import NO_TOKEN, pack

PAGE = 4
SHAPE = StepShape(decodes=4, tiles=3, tile=8, width=5, rows=8)
PAGE_ROWS = 1 + np.arange(6 * SHAPE.width, dtype=np.int32).reshape(6, SHAPE.width)  # of six slots


def sequence(slot: int, tokens: list[int], computed: int, inflight: int = 1) -> Sequence:
    request = Request(f"{slot}", tuple(tokens), SamplingParams(), arrival=0.0)
    return Sequence(request, 0, 0, 99, num_computed=computed, num_inflight=inflight, slot=slot)


def packed(work: Work) -> dict[str, np.ndarray]:
    vector = pack(work, SHAPE, PAGE_ROWS, PAGE)
    return {name: SHAPE.view(vector, name) for name in SHAPE.fields}


def test_packed_step_has_computed_tokens_side_by_side() -> None:
    decodes = sequence(2, [5, 6, 7], 3), sequence(5, [1, 2, 3, 4, 9], 5, inflight=2)
    chunk = Chunk(sequence(1, list(range(20, 40)), 14), 4, 10, last=True)
    view = packed(Work(0, decodes, (chunk,)))
    none = [NO_TOKEN] * 2
    assert view["tokens"].tolist() == [*none, 7, -1 - 5, *range(24, 34), *([NO_TOKEN] * 14)]
    assert view["positions"][:14].tolist() == [0, 0, 2, 4, *range(4, 14)]
    assert view["decode_lengths"].tolist() == [0, 0, 3, 5]
    np.testing.assert_array_equal(view["decode_pages"][2:], PAGE_ROWS[[2, 5]])
    assert view["slots"][:4].tolist() == [0, 0, PAGE_ROWS[2, 0] * PAGE + 2, PAGE_ROWS[5, 1] * PAGE]
    assert view["slots"][4:14].tolist() == [PAGE_ROWS[1, p // PAGE] * PAGE + p % PAGE for p in range(4, 14)]
    assert view["tile_starts"].tolist() == [4, 12, 0]
    assert view["tile_lengths"].tolist() == [8, 2, 0]


def test_sampled_rows_are_decodes_then_chunk_ends_then_padding() -> None:
    chunks = Chunk(sequence(0, [1] * 9, 9), 0, 9, last=True), Chunk(sequence(1, [1] * 3, 3), 0, 3, last=True)
    view = packed(Work(0, (sequence(2, [5, 6], 2),), chunks))
    assert view["rows"].tolist() == [3, 4 + 8, 4 + 16 + 2, *[SHAPE.tokens] * 5]
