"""The floor of quality: the loss that a profile expects, and the changes of layers that it leaves out."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.calibration.sensitivity import SensitivityProfile
from jaxserve.calibration.sensitivity.order import Sensitivity, sensitivity
from jaxserve.calibration.sensitivity.profile import FILE_NAME, LIS, MDS, LayerLosses, QualityCurve
from jaxserve.control.policies import ACCURACY, PERFORMANCE, MorphPolicy, MorphSettings, QualityLoss, load_policy
from jaxserve.control.policies.ladder import Ladder
from jaxserve.control.policies.morph_texts import change_text
from jaxserve.control.policies.quality import ASSUMED
from jaxserve.core.bundled import bundled_model_path
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
    assert set(found.loss.measured) == set(PROFILE.precisions)


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
    with_loss = ladder(ACCURACY, max_quality_loss=math.inf)
    without = Ladder(HOME.instances[0], MACHINE, ORDER, ACCURACY)
    assert precisions(with_loss) == precisions(without)


def test_policy_gets_the_floor_and_the_loss() -> None:
    policy = load_policy("morph-performance", MACHINE, ORDER, max_quality_loss=0.03, slo_tpot=0.05, loss=LOSS)
    assert isinstance(policy, MorphPolicy)
    assert (policy.max_quality_loss, policy.slo_tpot) == (0.03, 0.05)
    assert precisions(policy.init(HOME.instances[0]).ladder).count("int4") == 3
    by_default = load_policy("morph", MACHINE, ORDER, loss=LOSS)
    assert isinstance(by_default, MorphPolicy)
    assert (by_default.max_quality_loss, by_default.slo_tpot) == (0.05, None)
    assert precisions(by_default.init(HOME.instances[0]).ladder).count("int4") == 4
    without = load_policy("morph", MACHINE, ORDER, max_quality_loss=math.inf, loss=LOSS)
    assert isinstance(without, MorphPolicy)
    assert without.max_quality_loss is None
    assert set(precisions(without.init(HOME.instances[0]).ladder)) == {"int4"}


# -- models that were not measured


@pytest.mark.parametrize("num_layers", [1, 2, 3, 8, 30, 80])
def test_assumed_losses_add_up_and_grow_towards_the_last_layer(num_layers: int) -> None:
    loss = QualityLoss.assumed(num_layers)
    for precision, whole in ASSUMED.items():
        assert loss([precision] * num_layers) == pytest.approx(whole)
        assert max(loss.by_layer[precision]) == loss.by_layer[precision][-1]
    assert not loss.is_measured(["int4"] * num_layers)
    assert loss.nats(["int4"] * num_layers) is None
    assert loss.is_measured(["bfloat16"] * num_layers)


def test_assumed_losses_repeat_what_a_real_model_lost_in_its_parts() -> None:
    """SmolLM2-135M in int4, in nats: first half 0.060, second half 0.189, last layer 0.057, layer 0 0.003."""
    parts = QualityLoss.assumed(30).by_layer["int4"]
    first, second = sum(parts[:15]), sum(parts[15:])
    assert first / (first + second) == pytest.approx(0.060 / 0.249, abs=0.03)
    assert parts[-1] / sum(parts) == pytest.approx(0.057 / 0.249, abs=0.03)
    assert parts[0] / sum(parts) == pytest.approx(0.003 / 0.249, abs=0.01)


@pytest.mark.parametrize("name", ["morph", "morph-performance"])
def test_unmeasured_model_keeps_its_last_layer_out_of_int4_by_default(name: str) -> None:
    known = sensitivity(None, 16, ("int4", "int8"), None)
    policy = load_policy(name, MACHINE, known.swap_order, loss=known.loss)
    assert isinstance(policy, MorphPolicy)
    found = policy.init(HOME.instances[0]).ladder
    assert known.loss(precisions(found)) <= 0.05
    assert precisions(found)[-1] != "int4"
    first_half = [layer for layer in known.swap_order[:8] if layer < 8]
    assert len(first_half) == 8, "the expensive half comes last"


def test_precisions_that_a_profile_lacks_are_assumed() -> None:
    profile = replace(PROFILE, scores={"int4": PROFILE.scores["int4"]}, curves={"int4": PROFILE.curves["int4"]})
    known = Sensitivity.of(8, ("int8", "int4"), profile)
    assert known.swap_order == profile.order("int4")
    assert known.loss.is_measured(["int4", "bfloat16"])
    assert not known.loss.is_measured(["int4", "int8"])
    assert known.loss(["int8"] * 8) == pytest.approx(ASSUMED["int8"])
    assert known.loss.nats(["int4"] * 8) == pytest.approx(
        PROFILE.curves["int4"][PROFILE.order_name("int4")][0].cross_entropy[-1] - (PROFILE.cross_entropy or 0)
    )


def test_poisoned_layer_is_left_alone() -> None:
    losses = LayerLosses(alone=(0.001, 0.002, 3.0, 0.004), together=3.01, cross_entropy=2.0)
    profile = replace(PROFILE, num_layers=4, losses={"int4": losses}, scores={}, curves={})
    known = Sensitivity.of(4, ("int4",), profile)
    assert known.swap_order == (0, 1, 3, 2)
    assert known.loss(["int4", "int4", "bfloat16", "int4"]) < 0.05 < known.loss(["bfloat16", "bfloat16", "int4"])


def test_layers_add_at_least_what_all_together_lose() -> None:
    assert sum(LayerLosses((0.01, 0.03), 0.08, 2.0).added) == pytest.approx(0.08)
    assert LayerLosses((0.01, 0.03), 0.02, 2.0).added == (0.01, 0.03)
    assert LayerLosses((0.0, 0.0), 0.0, 2.0).added == (0.0, 0.0)


def test_reasons_name_the_price() -> None:
    loss, before = QualityLoss.assumed(16), HOME.instances[0]
    after = before.with_precisions({"layers.1": "int4", "layers.2": "int4"})
    price = loss(after.layer_precisions)
    assert change_text(before, after, loss) == f"layers 1, 2 to int4: +{price:.1%} loss".replace("%", " %")
    assert change_text(after, before, loss) == f"layers 1, 2 to bfloat16: -{price:.1%} loss".replace("%", " %")
    assert change_text(before, after) == "layers 1, 2 to int4"
