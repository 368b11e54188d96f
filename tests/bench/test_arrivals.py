"""Arrivals: the offered load, burstiness and ramp-up."""

import math

import numpy as np
import pytest

from jaxserve.bench.arrivals import RampUp, arrivals
from jaxserve.core.errors import ConfigError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_arrivals_at_infinite_rate_are_all_at_0():
    assert arrivals(5, math.inf, 1.0, rng()).tolist() == [0.0] * 5


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0, math.inf])
@pytest.mark.parametrize("seed", range(3))
def test_arrivals_of_every_seed_offer_the_same_load(burstiness, seed):
    times = arrivals(200, 8.0, burstiness, rng(seed))
    assert times[-1] == pytest.approx(200 / 8)
    assert np.all(np.diff(times) >= 0)
    assert times[0] > 0


def test_arrivals_with_infinite_burstiness_are_even():
    assert arrivals(4, 2.0, math.inf, rng()).tolist() == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_vary_as_the_gamma_distribution(burstiness):
    gaps = np.diff(arrivals(100_000, 10.0, burstiness, rng()))
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.03)


def test_ramp_up_goes_from_rate_to_rate():
    linear, exponential = RampUp("linear", 2, 8).rates(3), RampUp("exponential", 2, 8).rates(3)
    assert linear.tolist() == [2, 5, 8]
    assert exponential.tolist() == pytest.approx([2, 4, 8])


def test_ramp_up_is_not_scaled_and_holds_instead_of_the_rate():
    times = arrivals(3, math.inf, math.inf, rng(), RampUp("linear", 1, 4))
    assert times.tolist() == pytest.approx([1, 1.4, 1.65])


def test_no_requests_have_no_arrivals():
    assert arrivals(0, 3.0, 1.0, rng()).tolist() == []


@pytest.mark.parametrize("rate", [0, -1, math.nan])
def test_rate_must_be_positive(rate):
    with pytest.raises(ConfigError, match="--request-rate"):
        arrivals(3, rate, 1.0, rng())


@pytest.mark.parametrize("burstiness", [0, -1, math.nan])
def test_burstiness_must_be_positive(burstiness):
    with pytest.raises(ConfigError, match="--burstiness"):
        arrivals(3, 1.0, burstiness, rng())


@pytest.mark.parametrize("rates", [(0, 4), (1, -4), (1, math.inf)])
def test_ramp_up_needs_positive_finite_rates(rates):
    with pytest.raises(ConfigError, match="ramp-up"):
        RampUp("linear", *rates)


def test_ramp_up_with_unknown_strategy_is_refused():
    with pytest.raises(ConfigError, match="'square'"):
        RampUp("square", 1, 2)
