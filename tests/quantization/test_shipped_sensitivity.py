"""The sensitivity profile shipped with the bundled model belongs to its weights, and its order beats others."""

import pytest

from jaxserve.calibration.sensitivity import SensitivityProfile
from jaxserve.calibration.sensitivity.profile import FILE_NAME, LIS, RANDOM
from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.variants import fingerprint
from jaxserve.core.bundled import bundled_model_path

PROFILE = SensitivityProfile.load(bundled_model_path() / FILE_NAME)


@pytest.mark.parametrize("measure", ["cross_entropy", "kl"])
@pytest.mark.parametrize("precision", ["int4", "int3"])
def test_shipped_order_costs_less_than_random_orders(precision: str, measure: str) -> None:
    """int8 is left out, since its differences in cross-entropy are noise."""
    (lis,), others = PROFILE.curves[precision][LIS], PROFILE.curves[precision][RANDOM]
    assert len(others) == 5
    assert lis.area(measure) < sum(curve.area(measure) for curve in others) / len(others)


@pytest.mark.parametrize("precision", ["int8", "int4", "int3"])
def test_shipped_order_and_curve_cover_all_layers(precision: str) -> None:
    (lis,) = PROFILE.curves[precision][LIS]
    assert sorted(PROFILE.order(precision)) == list(range(PROFILE.num_layers))
    assert lis.swapped == tuple(range(PROFILE.num_layers + 1))


def test_shipped_profile_was_measured_on_the_shipped_weights() -> None:
    checkpoint = open_checkpoint(bundled_model_path())
    PROFILE.check_model(fingerprint(checkpoint), checkpoint.config.num_layers)
