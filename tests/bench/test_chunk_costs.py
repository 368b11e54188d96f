"""The fit of a chunk's cost to recorded steps, which finds out what of their padding is computed."""

import pytest

from bench.chunk_costs import COUNTS, best_count, divided, error_of_fit, report
from jaxserve.engine.step_log import Step
from jaxserve.scheduler.chunk_cost import pairs

TILE = 16
A, B, G = 2e-8, 3e-5, 4e-3


def steps(count: str) -> list[Step]:
    """Return steps, each three times, that take what the formula says with tokens counted in one way."""
    made: list[Step] = []
    begun = 0.0
    for number, prefix in enumerate((0, 160, 640) * 8):
        length, chunks, sequences = 5 + 11 * number, 1 + number % 3, (0, 4)[number % 2]
        tiles = chunks * -(-length // TILE)
        shape = TILE << (tiles - 1).bit_length()
        prefill = chunks * int(pairs(prefix, length))
        for _ in range(3):
            load = shape + sequences, 8, sequences, 0, prefill
            step = Step(0, len(made), begun, begun, 0.0, *load, chunks, chunks * length, version=0, tiles=tiles)
            begun += A * (prefill + sequences) + B * COUNTS[count](step, TILE) + G
            made.append(step._replace(ended=begun))
    return made


@pytest.mark.parametrize("count", COUNTS)
def test_the_right_count_of_tokens_is_found_and_fits_exactly(count: str) -> None:
    name, cases = best_count(steps(count), TILE, decodes=False)
    assert name == count
    assert error_of_fit(cases) < 1e-6
    assert all(len(part) >= 4 for part in divided(cases))
    assert any("together" in line and " 0.0%" in line for line in report(cases))
