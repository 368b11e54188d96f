"""The profile that is shipped with the bundled model: by what it holds, its order is better than others. No JAX."""

from pathlib import Path

import pytest

from jaxserve.bundled import bundled_model_path
from jaxserve.quantization.sensitivity import SensitivityProfile
from jaxserve.quantization.sensitivity.profile import FILE_NAME, LIS, RANDOM

PROFILE = SensitivityProfile.load(bundled_model_path() / FILE_NAME)
RESULTS = Path(__file__).parents[2] / "bench/RESULTS.md"


@pytest.mark.parametrize("measure", ["cross_entropy", "kl"])
@pytest.mark.parametrize("precision", ["int4", "int3"])
def test_the_order_costs_less_than_random_orders_do_on_average(precision: str, measure: str) -> None:
    """In int8 the differences in cross-entropy are noise."""
    (lis,), others = PROFILE.curves[precision][LIS], PROFILE.curves[precision][RANDOM]
    assert len(others) == 5
    assert lis.area(measure) < sum(curve.area(measure) for curve in others) / len(others)


@pytest.mark.parametrize("precision", ["int8", "int4", "int3"])
def test_the_order_and_its_curve_are_of_all_layers(precision: str) -> None:
    (lis,) = PROFILE.curves[precision][LIS]
    assert sorted(PROFILE.order(precision)) == list(range(PROFILE.num_layers))
    assert lis.swapped == tuple(range(PROFILE.num_layers + 1))


def test_the_results_are_of_these_weights() -> None:
    assert f"fingerprint of the model `{PROFILE.model_sha256[:12]}`" in RESULTS.read_text()
