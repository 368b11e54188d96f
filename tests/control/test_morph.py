"""The morph policy on snapshots made by hand: when it acts, on which layers, and which reasons it gives."""

import re
from dataclasses import replace

import pytest

from jaxserve.control import Plan, Resources, chain
from jaxserve.control.policies import (
    ACCURACY,
    INT8,
    PERFORMANCE,
    MorphPolicy,
    MorphSettings,
    StaticPolicy,
)
from jaxserve.control.resources import validate
from jaxserve.core.errors import ConfigError
from jaxserve.telemetry import Recent, Snapshot
from tests.support.control import TO_INT4, home_plan, machine, snapshot

ORDER = (3, 7, 11, 1, 5, 9, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14)
HOME, MACHINE = home_plan(), machine()
CALM = Recent(5.0, 0.0, 0.0, 0.0, 0.0, 0, None, None, 0.0, 0.0, 0.0, 0.0)


def int4(plan: Plan, instance: int = 0) -> list[int]:
    """Return the layers in int4."""
    return [n for n, precision in enumerate(plan.instances[instance].layer_precisions) if precision == "int4"]


class DrivenPolicy:
    """A policy whose proposals are carried out at once."""

    def __init__(
        self,
        settings: MorphSettings = TO_INT4,
        *,
        plan: Plan = HOME,
        resources: Resources = MACHINE,
        order: tuple[int, ...] = ORDER,
    ):
        self.policy, self.plan, self.resources = MorphPolicy(resources, order, settings), plan, resources
        self.state = self.policy.init(plan)
        self.reasons: list[str] = []
        self.note = ""  # what it waits for

    def see(self, *snapshots: Snapshot) -> bool:
        """Ask the policy about these snapshots, and return whether the plan changed."""
        proposal = self.policy.update(snapshots, self.plan, self.state)
        changed = proposal.plan.instances != self.plan.instances
        assert proposal.reason or not changed
        self.reasons += [proposal.reason] if changed else []
        self.note = "" if changed else proposal.reason
        self.plan, self.state = proposal.plan, proposal.state
        validate(self.plan, self.resources)
        return changed

    def see_for(self, start: float, seconds: float, **values: object) -> list[float]:
        """Return the times at which the plan changed while the engine stays in one state (ten ticks a second)."""
        times = [start + n / 10 for n in range(round(seconds * 10))]
        pages = self.plan.instances[0].kv_pages - 1
        return [t for t in times if self.see(snapshot(t, **({"pages": pages} | values)))]  # type: ignore[arg-type]

    def press(self, seconds: float = 30.0) -> None:
        """Keep up pressure until all layers that the mode allows are swapped."""
        self.see_for(0, seconds, num_waiting=9, oldest_wait=0.3)


def test_long_queue_swaps_the_first_layers_in_order_and_grows_the_pool() -> None:
    driver = DrivenPolicy()
    assert driver.see_for(0, 0.5, num_waiting=3, oldest_wait=0.24) == [0.2]
    assert int4(driver.plan) == [3, 7]
    assert driver.plan.instances[0].kv_pages == 461
    assert driver.reasons == ["queue delay 240 ms > 100 ms: layers 3, 7 to int4, KV 401 -> 461 pages"]


def test_segmented_pool_swaps_as_many_layers_as_the_next_segment_needs() -> None:
    """A layer frees 30 pages."""
    driver = DrivenPolicy(resources=machine(max_pages=761, segments=(401, 100, 130, 130)))
    assert driver.see_for(0, 0.5, kv_pages_used=390) == [0.2]
    assert int4(driver.plan) == sorted(ORDER[:4]), "two would be too few"
    assert driver.plan.instances[0].kv_pages == 501
    assert driver.see_for(1, 0.5, kv_pages_used=490) != []
    assert (len(int4(driver.plan)), driver.plan.instances[0].kv_pages) == (8, 631)
    assert driver.see_for(2, 0.5, kv_pages_used=620) != []
    assert (len(int4(driver.plan)), driver.plan.instances[0].kv_pages) == (12, 761), "which is all that the mode allows"
    assert driver.see_for(3, 5, kv_pages_used=750) == []
    assert driver.see_for(10, 30, kv_pages_used=0) != []
    assert driver.plan.instances == HOME.instances


def test_kv_pressure_swaps_layers_of_all_stages() -> None:
    """The first two layers of the order belong to the first stage."""
    driver = DrivenPolicy(plan=home_plan(pp=2), resources=machine(pp=2))
    assert driver.see_for(0, 0.5, kv_pages_used=390) == [0.2]
    assert int4(driver.plan) == [3, 7, 11]
    assert driver.plan.instances[0].kv_pages == 401 + 60, "a layer frees 60 of its stage's"


def test_layers_that_free_no_pages_do_not_block_the_following_layers() -> None:
    """The first two layers start in int8, which is kept as int4 is: a swap would only make them faster."""
    home = HOME.with_precisions(0, {"layers.3": "int8", "layers.7": "int8"})
    driver = DrivenPolicy(plan=home, resources=machine(in_place=("int8", "int4")))
    driver.plan = home.with_kv_pages(0, 481)  # both leave their 40 pages
    driver.state = driver.policy.init(driver.plan)
    assert driver.see_for(0, 0.5, kv_pages_used=470) == [0.2]
    assert int4(driver.plan) == [3, 7, 11]
    assert driver.plan.instances[0].kv_pages == 521


def test_kv_pressure_without_an_affordable_segment_swaps_no_layer() -> None:
    driver = DrivenPolicy(resources=machine(max_pages=901, segments=(401, 500)))
    assert driver.see_for(0, 5, kv_pages_used=390) == []
    assert driver.see_for(5, 0.5, kv_pages_used=390, num_waiting=3, oldest_wait=0.2) != []
    assert (len(int4(driver.plan)), driver.plan.instances[0].kv_pages) == (2, 401)


def test_layers_larger_than_in_the_first_plan_are_swapped_back() -> None:
    """An operator's plan was in force. A layer in int4 leaves 30 pages more than one in bfloat16."""
    home = HOME.with_precisions(0, {f"layers.{n}": "int4" for n in range(16)}).with_kv_pages(0, 881)
    driver = DrivenPolicy(plan=home)
    driver.plan = home.with_precisions(0, {f"layers.{n}": "bfloat16" for n in range(8)}).with_kv_pages(0, 600)
    assert driver.see_for(0, 10) != []
    assert driver.plan.instances == home.instances


def test_recent_pressure_peak_delays_the_release() -> None:
    driver = DrivenPolicy()
    driver.press()
    assert driver.see_for(40, 10, recent=replace(CALM, max_wait=0.3)) == []
    assert driver.see_for(50, 10, recent=replace(CALM, max_kv_usage=0.9)) == []
    assert driver.see_for(60, 1) != []


def test_kv_usage_above_its_threshold_swaps_layers() -> None:
    driver = DrivenPolicy()
    assert not driver.see_for(0, 5, kv_pages_used=340), "85 % is not more than 85 %"
    driver.see_for(5, 0.3, kv_pages_used=341)
    assert driver.reasons == ["KV usage 85.2% > 85%: layers 3, 7 to int4, KV 401 -> 461 pages"]


def test_short_pressure_swaps_no_layer() -> None:
    driver = DrivenPolicy()
    for number in range(100):
        assert not driver.see(snapshot(number * 0.3, num_waiting=1, oldest_wait=0.15))
        assert not driver.see(snapshot(number * 0.3 + 0.15))


def test_note_under_pressure_says_what_is_waited_for() -> None:
    driver, pressed = DrivenPolicy(), {"num_waiting": 3, "oldest_wait": 0.24}
    driver.see_for(0, 0.2, **pressed)
    assert driver.note == "pressure for 0.1 s < 0.2 s"
    driver.see(snapshot(0.2, **pressed))
    assert driver.note == ""
    driver.see_for(0.3, 0.2, **pressed)
    assert driver.note == "pressure, 0.2 s after the last entry < 0.5 s"
    driver.press()
    assert driver.note == "queue delay 300 ms > 100 ms: no layer is left to go to int4"
    driver = DrivenPolicy(resources=replace(MACHINE, max_pages=401))
    driver.see_for(0, 5, kv_pages_used=399)
    assert driver.note == "KV usage 99.8% > 85%: more layers would give no more pages"


def test_note_in_the_first_plan_without_pressure_is_empty() -> None:
    driver = DrivenPolicy()
    driver.see_for(0, 10, num_waiting=1, kv_pages_used=300, recent=replace(CALM, preemptions=1))
    assert driver.note == ""
    driver.press(1)
    driver.see_for(10, 10)
    assert (driver.plan.instances, driver.note) == (HOME.instances, "")


def test_sustained_pressure_swaps_layers_step_by_step_up_to_most_layers() -> None:
    driver = DrivenPolicy()
    times = driver.see_for(0, 30, num_waiting=9, oldest_wait=0.3)
    assert times == pytest.approx([0.2, 0.8, 1.3, 1.8, 2.4, 2.9])
    assert int4(driver.plan) == sorted(ORDER[:12])
    assert driver.plan.instances[0].kv_pages == MACHINE.kv_capacity(driver.plan.instances[0]) == 761


def test_performance_mode_swaps_all_layers() -> None:
    driver = DrivenPolicy(PERFORMANCE)
    driver.press()
    assert int4(driver.plan) == list(range(16))


def test_accuracy_mode_swaps_remaining_layers_to_int8() -> None:
    driver = DrivenPolicy(ACCURACY)
    driver.see_for(0, 30, num_waiting=9, oldest_wait=0.3)
    assert int4(driver.plan) == sorted(ORDER[:4])
    assert [driver.plan.instances[0].layer_precisions[layer] for layer in ORDER[4:]] == ["int8"] * 12
    assert driver.plan.instances[0].kv_pages == MACHINE.kv_capacity(driver.plan.instances[0])
    assert driver.note.endswith("no layer is left to go to int4 or int8")
    driver.see_for(30, 6)
    assert int4(driver.plan) == sorted(ORDER[:4]), "the last to go are the first to come back"
    driver.see_for(36, 14)
    assert driver.plan.instances == HOME.instances


def test_reason_of_a_decision_with_two_precisions_names_both() -> None:
    driver = DrivenPolicy(replace(ACCURACY, most_layers=0.125, entry_layers=4))
    driver.see_for(0, 0.3, num_waiting=9, oldest_wait=0.3)
    first, second, third, fourth = ORDER[:4]
    assert f"layers {first}, {second} to int4, layers {third}, {fourth} to int8, KV" in driver.reasons[0]
    driver.press()
    foreseen = driver.policy.foresee(HOME)[-1].instances[0].layer_precisions
    assert foreseen == driver.plan.instances[0].layer_precisions


def test_int8_mode_swaps_all_layers_to_int8_only() -> None:
    driver = DrivenPolicy(INT8)
    driver.press()
    assert set(driver.plan.instances[0].layer_precisions) == {"int8"}
    assert driver.plan.instances[0].kv_pages == MACHINE.kv_capacity(driver.plan.instances[0])
    driver.see_for(30, 20)
    assert driver.plan.instances == HOME.instances


@pytest.mark.parametrize(
    ("settings", "counts"), [(ACCURACY, [2, 4, 8, 16]), (TO_INT4, [2, 4, 8, 12]), (PERFORMANCE, [4, 8, 16])]
)
def test_foresee_lists_the_plans_reached_under_pressure(settings: MorphSettings, counts: list[int]) -> None:
    policy = MorphPolicy(MACHINE, ORDER, settings)
    for asked in (policy, chain(StaticPolicy(), policy)):
        foreseen = [plan.instances[0].layer_precisions for plan in asked.foresee(HOME)]
        assert [[layers[layer] for layer in ORDER] for layers in foreseen] == [
            [settings.precision_at(place, 16) if place < count else "bfloat16" for place in range(16)]
            for count in counts
        ]
    assert list(chain(StaticPolicy()).foresee(HOME)) == []


def test_queue_delay_near_the_slo_swaps_more_layers_at_once() -> None:
    driver = DrivenPolicy()
    driver.see_for(0, 0.3, num_waiting=9, oldest_wait=1.2)
    assert int4(driver.plan) == sorted(ORDER[:8])
    assert driver.reasons[0].startswith("queue delay 1200 ms > 100 ms, near the SLO (from 1000 ms): layers 3, 7, 11, 1")


def test_kv_pressure_on_a_pool_that_cannot_grow_swaps_no_layer() -> None:
    driver = DrivenPolicy(resources=replace(MACHINE, max_pages=401))
    assert not driver.see_for(0, 5, kv_pages_used=399)
    assert driver.see_for(5, 1, kv_pages_used=399, num_waiting=2, oldest_wait=0.2), "fewer bits are faster, too"
    assert driver.plan.instances[0].kv_pages == 401


def test_layers_already_swapped_or_outside_the_order_stay() -> None:
    plan = HOME.with_precisions(0, {"layers.3": "int4"})
    driver = DrivenPolicy(PERFORMANCE, plan=plan, order=(3, 7, 11))
    driver.press()
    assert int4(driver.plan) == [3, 7, 11]
    driver.see_for(30, 20)
    assert driver.plan.instances == plan.instances


def test_policy_without_load_changes_nothing() -> None:
    for settings in (ACCURACY, PERFORMANCE):
        assert not DrivenPolicy(settings).see_for(0, 3600)


@pytest.mark.parametrize("settings", [ACCURACY, TO_INT4, PERFORMANCE])
def test_quiet_releases_all_layers_in_reverse_order_within_ten_seconds(settings: MorphSettings) -> None:
    driver = DrivenPolicy(settings)
    driver.press()
    at_home = driver.plan.instances[0].layer_precisions.count("bfloat16")
    swapped = len(ORDER) - at_home
    times = driver.see_for(30, 60)
    assert driver.plan.instances == HOME.instances
    assert len(times) == swapped / 4
    assert times[0] == pytest.approx(35)
    assert times[-1] <= 37
    assert driver.reasons[-1] == (
        f"quiet for {times[-1] - 30:.1f} s >= 5 s, nothing waiting, mean queue 0.0 <= 0.5, no preemption in 5 s, "
        f"0 pages in use <= {settings.release_usage:.0%} of 400: layers 1, 11, 7, 3 to bfloat16, KV 521 -> 401 pages"
    )


def test_reason_of_a_partial_release_says_what_limits_it() -> None:
    """The average use is named where it is larger than the present one."""
    driver = DrivenPolicy(PERFORMANCE)
    driver.press()
    driver.see_for(30, 6, recent=replace(CALM, kv_usage=0.55), kv_pages_used=0)
    assert driver.reasons[-1].endswith(
        "484 pages in use on average <= 60% of 820: layers 14, 12 to bfloat16, KV 881 -> 821 pages; "
        "for more: 484 pages in use on average > 60% of 790"
    )


@pytest.mark.parametrize(
    ("blocking", "note"),
    [
        ({"num_waiting": 1}, "1 waiting > 0"),
        ({"num_waiting": 1, "oldest_wait": 0.2}, "queue delay 200 ms > 100 ms: no layer is left to go to int4"),
        ({"recent": replace(CALM, waiting=0.6)}, "mean queue 0.6 > 0.5"),
        ({"recent": replace(CALM, preemptions=1)}, "preemptions in the last 5 s: 1 > 0"),
        # Of 760; of the 731 pages that would be left with one layer less 70 % are 511.
        ({"kv_pages_used": 512}, "512 pages in use > 70% of 730"),
        ({"recent": replace(CALM, kv_usage=512 / 760)}, "512 pages in use on average > 70% of 730"),
        ({"kv_pages_used": 400, "recent": replace(CALM, kv_trend=0.04)}, "552 pages in use in 5 s > 70% of 730"),
        ({"recent": replace(CALM, max_wait=0.3)}, "queue delay in the last 5 s: 300 ms > 100 ms"),
        ({"recent": replace(CALM, max_kv_usage=0.9)}, "KV usage in the last 5 s: 90.0% > 85%"),
    ],
)
def test_blocked_release_keeps_layers_and_notes_the_reason(blocking: dict[str, object], note: str) -> None:
    driver = DrivenPolicy()
    driver.press()
    assert not driver.see_for(30, 20, **blocking)
    assert driver.note == note
    driver.see_for(50, 10)
    assert driver.plan.instances == HOME.instances


def test_release_under_load_keeps_the_usage_margin() -> None:
    driver = DrivenPolicy()
    driver.press()
    for number in range(300):
        driver.see(snapshot(30 + number / 10, pages=driver.plan.instances[0].kv_pages - 1, kv_pages_used=330))
    assert int4(driver.plan) == [3, 7, 11]
    assert driver.plan.instances[0].kv_pages == 491, (
        "330 is below 70 % of 490, and above 70 % of the 460 that come next"
    )


def test_release_after_a_relapse_waits_for_lower_arrivals() -> None:
    steady = replace(CALM, arrivals_per_s=10.0)
    driver = DrivenPolicy()
    driver.press(1)
    assert driver.see_for(10, 10, recent=steady), "released, with ten arrivals a second"
    assert driver.plan.instances == HOME.instances
    assert driver.see_for(20, 1, recent=steady, num_waiting=1, oldest_wait=0.2), "which was a mistake"
    assert not driver.see_for(21, 3, recent=steady)
    assert driver.note == "quiet for 2.9 s < 5 s"
    assert not driver.see_for(24, 297, recent=steady)
    assert driver.note == "held after a relapse: 10.0 arrivals/s > 75% of 10.0, for 299 s more"
    assert not driver.see_for(321, 60, recent=replace(CALM, arrivals_per_s=7.6))
    assert driver.see_for(381, 1, recent=replace(CALM, arrivals_per_s=7.4))


def test_hold_after_a_relapse_expires() -> None:
    steady = replace(CALM, arrivals_per_s=10.0)
    driver = DrivenPolicy()
    driver.press(1)
    driver.see_for(10, 10, recent=steady)
    (entry,) = driver.see_for(20, 0.5, recent=steady, num_waiting=1, oldest_wait=0.2)
    (release,) = driver.see_for(21, 700, recent=steady)
    assert release - entry == pytest.approx(600, abs=0.2)


def test_relapse_under_risen_load_does_not_hold_the_next_release() -> None:
    low, high = replace(CALM, arrivals_per_s=3.0), replace(CALM, arrivals_per_s=12.0)
    driver = DrivenPolicy()
    for start in range(0, 200, 20):
        assert driver.see_for(start, 5, recent=high, num_waiting=4, oldest_wait=0.3)
        driver.see_for(start + 5, 15, recent=low)
        assert driver.plan.instances == HOME.instances


def test_relapse_after_a_release_without_arrivals_does_not_hold_the_next() -> None:
    driver = DrivenPolicy()
    driver.press(1)
    driver.see_for(10, 10)
    assert driver.see_for(20, 1, kv_pages_used=390), "long answers fill the cache again"
    assert driver.see_for(21, 10, recent=replace(CALM, arrivals_per_s=1.0))


def test_pressure_never_shrinks_a_pool() -> None:
    larger = replace(HOME, instances=HOME.with_kv_pages(0, 300).instances)
    driver = DrivenPolicy(plan=larger)
    driver.plan = HOME
    driver.see_for(0, 0.4, kv_pages_used=390)
    assert driver.plan.instances[0].kv_pages == 461
    driver.policy = MorphPolicy(MACHINE, ())
    driver.plan = HOME
    assert not driver.see_for(1, 5, num_waiting=3, oldest_wait=0.5)


def test_each_instance_follows_its_own_snapshot() -> None:
    driver = DrivenPolicy(plan=home_plan(pp=2, dp=2), resources=machine(pp=2))
    for number in range(10):
        pressed = snapshot(number / 10, num_waiting=2, oldest_wait=0.2)
        driver.see(snapshot(number / 10), pressed)
    assert int4(driver.plan, 0) == []
    assert int4(driver.plan, 1) == [1, 3, 7, 11]
    stages = driver.plan.instances[1].stages
    assert {stage.kv_pages for stage in stages} == {driver.resources.kv_capacity(driver.plan.instances[1])}
    assert driver.reasons[0].startswith("instance 1: queue delay 200 ms > 100 ms: layers 3, 7 to int4")
    driver.see(snapshot(1.0, num_waiting=2, oldest_wait=0.2), snapshot(1.0))
    assert driver.note == "instance 0: pressure for 0.0 s < 0.2 s; instance 1: quiet for 0.0 s < 5 s"
    driver.see(snapshot(1.25, num_waiting=2, oldest_wait=0.2), snapshot(1.25))
    assert driver.reasons[-1].startswith("instance 0: queue delay 200 ms > 100 ms: layers 3, 7 to int4")
    assert "instance 1" not in driver.reasons[-1], "what others wait for is no reason"


def test_policy_continues_from_the_plan_in_force_after_failures() -> None:
    driver = DrivenPolicy()
    driver.press(1)
    assert int4(driver.plan) == [1, 3, 7, 11]
    driver.plan = driver.plan.with_precisions(0, {"layers.7": "bfloat16"}).with_kv_pages(0, 450)
    driver.see_for(2, 0.5, num_waiting=2, oldest_wait=0.2)
    assert int4(driver.plan) == [1, 3, 5, 7, 11]
    assert driver.plan.instances[0].kv_pages == MACHINE.kv_capacity(driver.plan.instances[0])
    driver.plan = HOME.with_kv_pages(0, 300)
    driver.see_for(10, 10)
    assert driver.plan.instances == HOME.instances


@pytest.mark.parametrize(
    ("order", "settings", "message"),
    [
        ((1, 2, 1), ACCURACY, "names a layer twice: [1, 2, 1]"),
        ((1, 16), ACCURACY, "layers.16 of the swap order cannot be int4: the model has no such layer"),
        ((1,), replace(ACCURACY, precision="int3"), "cannot be int3: choose from bfloat16, int8, int4"),
        ((1,), replace(ACCURACY, rest="int3"), "cannot be int3: choose from bfloat16, int8, int4"),
    ],
)
def test_invalid_swap_order_is_refused(order: tuple[int, ...], settings: MorphSettings, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        MorphPolicy(MACHINE, order, settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_usage", 1.5),
        ("most_layers", 0.0),
        ("slo_ttft", 0.0),
        ("slo_ttft", float("inf")),
        ("slo_ttft", float("nan")),
        ("queue_delay", float("nan")),
        ("release_horizon", float("inf")),
        ("entry_layers", 0),
        ("entry_hold", -1.0),
        ("entry_hold", float("inf")),
        ("release_usage", 0.9),
    ],
)
def test_settings_outside_their_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}: it must be"):
        replace(ACCURACY, **{name: value})


def test_infinite_queue_delay_leaves_kv_usage_as_the_only_pressure() -> None:
    driver = DrivenPolicy(replace(ACCURACY, queue_delay=float("inf")))
    assert not driver.see_for(0, 2, num_waiting=9, oldest_wait=60.0)
    assert driver.see_for(2, 2, num_waiting=9, oldest_wait=60.0, kv_pages_used=390)
