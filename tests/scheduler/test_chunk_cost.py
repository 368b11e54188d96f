"""A fit of KunServe's cost model recovers the three coefficients from times that were made with them."""

import numpy as np
import pytest

from jaxserve.core.errors import ConfigError
from jaxserve.scheduler.chunk_cost import ChunkCost, non_negative_by_subsets, pairs

MADE = ChunkCost(a=3e-9, b=2e-5, g=4e-3)
LENGTHS = [32, 64, 128, 256, 512, 512, 512, 2048]
PREFIXES = [0, 0, 0, 0, 0, 1024, 8192, 4096]


def made(cost: ChunkCost) -> list[float]:
    return [cost.seconds(p, c) for p, c in zip(PREFIXES, LENGTHS, strict=True)]


def test_seconds_are_those_of_the_formula():
    assert pairs(100, 10) == 100 * 10 + 10 * 10 + 10
    assert MADE.seconds(100, 10) == pytest.approx(3e-9 * 1110 + 2e-5 * 10 + 4e-3)


def test_a_fit_finds_what_the_times_were_made_with():
    found = ChunkCost.fit(PREFIXES, LENGTHS, made(MADE))
    assert (found.a, found.b, found.g) == pytest.approx((MADE.a, MADE.b, MADE.g))
    assert found.error(PREFIXES, LENGTHS, made(MADE)) == pytest.approx(0, abs=1e-9)


def test_noise_moves_a_fit_by_no_more_than_itself():
    rng = np.random.default_rng(0)
    prefixes, lengths = rng.integers(0, 8192, 200), rng.integers(16, 2048, 200)
    clean = np.array([MADE.seconds(p, c) for p, c in zip(prefixes, lengths, strict=True)])
    noisy = clean * rng.uniform(0.95, 1.05, 200)
    found = ChunkCost.fit(prefixes, lengths, noisy)
    assert found.error(prefixes, lengths, clean) < 0.02
    assert 0.01 < found.error(prefixes, lengths, noisy) < 0.05


def test_no_number_is_below_zero():
    steeper = [t * (1 - 0.3 * (c < 100)) for t, c in zip(made(ChunkCost(3e-9, 2e-5, 0)), LENGTHS, strict=True)]
    found = ChunkCost.fit(PREFIXES, LENGTHS, steeper)
    assert min(found.a, found.b, found.g) >= 0
    assert found.g == 0


def test_an_error_is_the_mean_of_the_relative_ones():
    assert ChunkCost(0, 0, 1).error([0, 0], [1, 1], [2, 0.8]) == pytest.approx((0.5 + 0.25) / 2)


def test_short_chunks_count_like_long_ones():
    rng = np.random.default_rng(1)
    wrong = [t * rng.uniform(0.9, 1.1) for t in made(MADE)]
    found = ChunkCost.fit(PREFIXES, LENGTHS, wrong)
    assert found.seconds(0, 32) == pytest.approx(MADE.seconds(0, 32), rel=0.1)


@pytest.mark.parametrize(
    ("prefixes", "lengths", "seconds"),
    [([], [], []), ([0, 0], [8, 16], [1, 2]), ([0] * 4, [8] * 4, [1, 2, 3, 4]), ([0] * 3, [8, 8, 16], [1, 1, 2])],
)
def test_chunks_that_do_not_tell_the_three_apart_are_refused(prefixes: list, lengths: list, seconds: list):
    with pytest.raises(ConfigError, match="do not determine a, b and g"):
        ChunkCost.fit(prefixes, lengths, seconds)


@pytest.mark.parametrize("seconds", [[1, 2], [1, 2, 0], [1, 2, -1]])
def test_times_must_be_as_many_and_above_zero(seconds: list):
    with pytest.raises(ConfigError, match="all above 0"):
        ChunkCost.fit([0, 0, 0], [8, 16, 32], seconds)


def test_the_best_without_negative_numbers_is_found_among_all():
    columns = np.array([[1.0, 1.0], [1.0, 1.1], [1.0, 0.9]])
    free = np.linalg.lstsq(columns, np.array([1.0, 0.5, 1.5]), rcond=None)[0]
    assert free.min() < 0
    best = non_negative_by_subsets(columns, np.array([1.0, 0.5, 1.5]))
    squares = [float(np.sum((columns @ np.array([x, y]) - [1, 0.5, 1.5]) ** 2)) for x in np.linspace(0, 2, 81)
               for y in np.linspace(0, 2, 81)]  # fmt: skip
    assert best.min() >= 0
    assert np.sum((columns @ best - [1, 0.5, 1.5]) ** 2) <= min(squares) + 1e-12


def test_a_prompt_takes_whole_tiles_and_a_decode_one_token():
    cost = ChunkCost(a=0.0, b=2.0, g=1.0, tile=8)
    assert [cost.added(5, length) for length in (1, 2, 8, 9, 16)] == [2.0, 16.0, 16.0, 32.0, 32.0]
