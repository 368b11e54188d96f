"""The floor of quality: the loss that a profile expects, and the changes of layers that it leaves out."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.calibration.sensitivity import SensitivityProfile
from jaxserve.calibration.sensitivity.order import sensitivity
from jaxserve.calibration.sensitivity.profile import FILE_NAME, LIS, MDS, QualityCurve
from jaxserve.control.policies import ACCURACY, PERFORMANCE, MorphPolicy, MorphSettings, QualityLoss, load_policy
from jaxserve.control.policies.ladder import Ladder
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.errors import ConfigError
from tests.support.control import home_plan, machine

ORDER = tuple(range(16))
HOME, MACHINE = home_plan(), machine()
PROFILE = SensitivityProfile.load(bundled_model_path() / FILE_NAME)
LOSS = QualityLoss({"int8": [0.001] * 16, "int4": [0.01] * 16})


def ladder(settings: MorphSettings, **changes: object) -> Ladder:
    return Ladder(HOME.instances[0], MACHINE, ORDER, replace(settings, **changes), LOSS)  # type: ignore[arg-type]


def precisions(found: Ladder) -> tuple[str, ...]:
    return found.plan(found.top).layer_precisions


@pytest.mark.parametrize("precision", PROFILE.precisions)
def test_loss_along_the_order_is_the_measured_curve(precision: str) -> None:
    loss, (curve,) = QualityLoss(PROFILE.layer_losses()), PROFILE.curves[precision][PROFILE.order_name(precision)]
    for count, cross_entropy in zip(curve.swapped, curve.cross_entropy, strict=True):
        swapped = PROFILE.order(precision)[:count]
        layers = [precision if layer in swapped else "bfloat16" for layer in range(PROFILE.num_layers)]
        assert loss(layers) == pytest.approx(cross_entropy / curve.cross_entropy[0] - 1, abs=1e-12)


def test_loss_of_a_mixture_is_the_sum_of_its_precisions() -> None:
    assert LOSS(["int8"] * 10 + ["int4"] * 4 + ["bfloat16"] * 2) == pytest.approx(0.05)


def test_layers_between_two_measured_points_share_the_loss() -> None:
    curve = QualityCurve((0, 4, 8), (2.0, 2.2, 3.0), (0.0, 0.1, 0.2), (1.0, 1.0, 1.0))
    profile = replace(PROFILE, curves={"int4": {LIS: (curve,)}}, scores={"int4": PROFILE.scores["int4"]})
    losses, order = profile.layer_losses()["int4"], profile.order("int4")
    assert [losses[layer] for layer in order] == pytest.approx([0.025] * 4 + [0.1] * 4)


def test_order_is_the_one_along_which_less_is_lost() -> None:
    (lis,), scores = PROFILE.curves["int4"][LIS], PROFILE.scores["int4"]
    better = replace(lis, cross_entropy=tuple(value - 0.001 * place for place, value in enumerate(lis.cross_entropy)))
    orders = {}
    for name, curves in {"lis": (lis, lis), "mds": (lis, better), "old": (lis, None)}.items():
        measured = {LIS: (curves[0],)} | ({MDS: (curves[1],)} if curves[1] else {})
        orders[name] = replace(PROFILE, curves=PROFILE.curves | {"int4": measured}).order("int4")
    assert orders == {"lis": scores.order, "mds": scores.mds_order, "old": scores.order}
    assert scores.mds_order != scores.order


def test_profile_without_a_curve_of_mds_can_be_read(tmp_path: Path) -> None:
    curves = {name: {LIS: PROFILE.curves[name][LIS]} for name in PROFILE.precisions}
    replace(PROFILE, curves=curves).save(tmp_path / FILE_NAME)
    found = sensitivity(tmp_path, 8, ("int4",), None)
    assert found.swap_order == PROFILE.scores["int4"].order
    assert found.layer_losses is not None
    assert set(found.layer_losses) == set(PROFILE.precisions)


@pytest.mark.parametrize("floor", [0.0, 0.005, 0.03, 0.05, 0.1, 0.5])
@pytest.mark.parametrize("settings", [ACCURACY, PERFORMANCE, replace(ACCURACY, last_resort="int4")])
def test_no_level_of_the_ladder_loses_more_than_the_floor(settings: MorphSettings, floor: float) -> None:
    found = ladder(settings, max_quality_loss=floor)
    losses = [LOSS(found.plan(level).layer_precisions) for level in range(found.top + 1)]
    assert max(losses) <= floor
    assert max(losses) > floor - 0.0101 or set(precisions(found)) == {"int4"}


def test_layers_that_may_not_go_to_int4_go_to_int8() -> None:
    assert precisions(ladder(ACCURACY, max_quality_loss=0.0055)) == ("int8",) * 5 + ("bfloat16",) * 11


def test_without_a_floor_the_loss_limits_nothing() -> None:
    with_loss, without = ladder(ACCURACY), Ladder(HOME.instances[0], MACHINE, ORDER, ACCURACY)
    assert precisions(with_loss) == precisions(without)


def test_policy_gets_the_floor_and_the_loss() -> None:
    policy = load_policy("morph-performance", MACHINE, ORDER, max_quality_loss=0.03, slo_tpot=0.05, loss=LOSS)
    assert isinstance(policy, MorphPolicy)
    assert (policy.max_quality_loss, policy.slo_tpot) == (0.03, 0.05)
    assert precisions(policy.init(HOME.instances[0]).ladder).count("int4") == 3
    without = load_policy("morph", MACHINE, ORDER)
    assert isinstance(without, MorphPolicy)
    assert (without.max_quality_loss, without.slo_tpot) == (None, None)
    assert without.settings.slo_tpot == math.inf


@pytest.mark.parametrize("source", ["static", "morph", "file"])
def test_floor_without_a_profile_is_refused(tmp_path: Path, source: str) -> None:
    (tmp_path / "own.yaml").write_text("policy: morph\nsettings: {max_quality_loss: 0.02}")
    given = {"max_quality_loss": 0.02} if source != "file" else {}
    with pytest.raises(ConfigError, match=r"max_quality_loss is 0\.02, but without .* make one with `jaxserve profile"):
        load_policy(tmp_path / "own.yaml" if source == "file" else source, MACHINE, ORDER, **given)


def test_floor_for_a_precision_that_was_not_profiled_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs the loss of int8, but the sensitivity profile has only int4"):
        load_policy("morph", MACHINE, ORDER, max_quality_loss=0.02, loss=QualityLoss({"int4": [0.1] * 16}))
