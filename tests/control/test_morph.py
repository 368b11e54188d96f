"""The morph policy on snapshots made by hand: when it acts, on which layers, and which reasons it gives."""

import re
from dataclasses import replace

import pytest

from jaxserve.control import InstancePlan, Resources, chain
from jaxserve.control.policies import ACCURACY, INT8, PERFORMANCE, MorphPolicy, MorphSettings, StaticPolicy
from jaxserve.control.policies.ladder import Loss
from jaxserve.control.policy import MAX_FORESEEN
from jaxserve.control.resources import validate_instance
from jaxserve.core.errors import ConfigError
from jaxserve.telemetry import Recent, Snapshot
from tests.support.control import TO_INT4, FakeCosts, costs_of, home_plan, machine, snapshot

ORDER = (3, 7, 11, 1, 5, 9, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14)
HOME, MACHINE = home_plan().instances[0], machine()  # a machine on which all steps take equally long
FASTER, SLOWER = machine(costs=costs_of(1.6)), machine(costs=costs_of(0.5))
CALM = Recent(5.0, 0.0, 0.0, 0.0, 0.0, 0, None, None, 0.0, 0.0, 0.0, 0.0)
PAGES_EACH = 10  # of a running sequence


def int4(plan: InstancePlan) -> list[int]:
    """Return the layers in int4."""
    return [n for n, precision in enumerate(plan.layer_precisions) if precision == "int4"]


class DrivenPolicy:
    """A policy whose proposals are carried out at once."""

    def __init__(
        self,
        settings: MorphSettings = TO_INT4,
        *,
        plan: InstancePlan = HOME,
        resources: Resources | None = None,
        order: tuple[int, ...] = ORDER,
        loss: Loss | None = None,
    ):
        resources = FASTER if resources is None else resources
        self.policy = MorphPolicy(resources, order, settings, loss=loss)
        self.plan, self.resources, self.home = plan, resources, plan
        self.state = self.policy.init(plan)
        self.reasons: list[str] = []
        self.note = ""  # what it waits for

    def see(self, snapshot: Snapshot) -> bool:
        """Ask the policy about a snapshot, and return whether the plan changed."""
        proposal = self.policy.update(snapshot, self.plan, self.state)
        changed = proposal.plan != self.plan
        assert proposal.reason or not changed
        self.reasons += [proposal.reason] if changed else []
        self.note = "" if changed else proposal.reason
        self.plan, self.state = proposal.plan, proposal.state
        validate_instance(self.plan, self.resources)
        return changed

    def see_for(self, start: float, seconds: float, **values: object) -> list[float]:
        """Return the times at which the plan changed while the engine stays in one state (ten ticks a second)."""
        times = [start + n / 10 for n in range(round(seconds * 10))]
        return [t for t in times if self.see(snapshot(t, **({"pages": self.plan.kv_pages - 1} | values)))]  # type: ignore[arg-type]

    def press(
        self, start: float, seconds: float, *, waiting: int = 9, wait: float = 0.3, **values: object
    ) -> list[float]:
        """Return the times of changes while sequences wait for pages, all of which are in use."""
        changes = []
        for number in range(round(seconds * 10)):
            pages = self.plan.kv_pages - 1
            used = {"kv_pages_used": pages, "num_running": pages // PAGES_EACH}
            queue = {"num_waiting": waiting, "oldest_wait": wait}
            if self.see(snapshot(start + number / 10, pages=pages, **(used | queue | values))):  # type: ignore[arg-type]
                changes.append(start + number / 10)
        return changes


# -- entry


def test_long_queue_changes_the_first_layers_in_order_and_grows_the_pool() -> None:
    driver = DrivenPolicy()
    assert driver.press(0, 0.5, wait=0.24) == [0.2]
    assert int4(driver.plan) == [3, 7]
    assert driver.plan.kv_pages == 461
    assert driver.reasons == [
        "queue delay 240 ms > 100 ms, KV usage 100.0% > 85%, "
        "the last of 9 waiting is expected to start within 1680 ms: "
        "layers 3, 7 to int4, KV 401 -> 461 pages; then within 685 ms"
    ]


def test_entry_is_as_large_as_the_waiting_sequences_need() -> None:
    """Two layers give room for six sequences."""
    for waiting, layers in ((6, 2), (12, 4), (24, 8)):
        driver = DrivenPolicy()
        assert driver.press(0, 0.3, waiting=waiting) == [0.2]
        assert len(int4(driver.plan)) == layers


def test_short_pressure_changes_no_layer() -> None:
    driver, pressed = DrivenPolicy(), {"num_running": 40, "kv_pages_used": 400}
    for number in range(100):
        assert not driver.see(snapshot(number * 0.3, num_waiting=1, oldest_wait=0.15, **pressed))  # type: ignore[arg-type]
        assert not driver.see(snapshot(number * 0.3 + 0.15))


def test_sustained_pressure_climbs_step_by_step_up_to_most_layers() -> None:
    driver = DrivenPolicy(replace(TO_INT4, few=False))
    assert driver.press(0, 1.5, waiting=7) == pytest.approx([0.2, 0.8, 1.3])
    driver.press(2, 10, waiting=90)
    assert int4(driver.plan) == sorted(ORDER[:12])
    assert driver.plan.kv_pages == MACHINE.kv_capacity(driver.plan) == 761
    assert driver.note.endswith(": no change is left")


def test_queue_delay_near_the_objective_changes_more_layers_at_once() -> None:
    driver = DrivenPolicy(replace(TO_INT4, urgent_delay=0.25))
    driver.press(0, 0.3, waiting=3, wait=0.6)
    assert int4(driver.plan) == sorted(ORDER[:8]), "two would be enough"


def test_queue_that_starts_in_time_changes_nothing() -> None:
    """Slots and pages are free: the queue is that of prompts, which are computed in the next step."""
    driver = DrivenPolicy(PERFORMANCE)
    assert not driver.see_for(0, 5, num_running=4, kv_pages_used=40, num_waiting=2, oldest_wait=0.2)
    expected = "queue delay 200 ms > 50 ms, but the last of 2 waiting is expected to start within 250 ms < 1000 ms"
    assert driver.note == expected


def test_kv_usage_changes_layers_only_if_it_will_make_sequences_wait() -> None:
    used = {"kv_pages_used": 360, "num_running": 36}
    driver = DrivenPolicy()
    assert not driver.see_for(0, 5, recent=replace(CALM, kv_trend=0.0), **used)
    assert (
        driver.note == "KV usage 90.0% > 85%, but nothing waits, and 90% of the pages are expected to be in use in 2 s"
    )
    rising = replace(CALM, arrivals_per_s=30.0)
    assert not driver.see_for(5, 5, recent=replace(rising, kv_trend=0.06), **used), "few more, and others end soon"
    assert (
        "102% of the pages are expected to be in use in 2 s, and the last of 5 sequences more is expected"
        in driver.note
    )
    assert driver.see_for(10, 0.3, recent=replace(rising, kv_trend=0.4), **used)
    assert driver.reasons[0].startswith(
        "KV usage 90.0% > 85%, 170% of the pages are expected to be in use in 2 s, "
        "and the last of 32 sequences more is expected to start within"
    )
    driver = DrivenPolicy()
    assert not driver.see_for(0, 5, recent=replace(rising, kv_trend=0.4), kv_pages_used=340, num_running=34), "not more"
    few = replace(rising, kv_trend=0.4, arrivals_per_s=2.0)
    assert not DrivenPolicy().see_for(0, 5, recent=few, **used), "no more will run at once than arrive in that time"


def test_preemptions_change_nothing_while_nothing_waits() -> None:
    driver = DrivenPolicy()
    assert not driver.see_for(0, 5, recent=replace(CALM, preemptions=1), kv_pages_used=395, num_running=40)


@pytest.mark.parametrize("resources", [MACHINE, SLOWER], ids=["as fast", "slower"])
def test_short_slots_change_nothing_unless_fewer_bits_are_faster(resources: Resources) -> None:
    slots = replace(resources, shapes=machine(max_num_seqs=16).shapes)
    full = {"num_running": 16, "kv_pages_used": 160, "num_waiting": 9, "oldest_wait": 0.9}
    driver = DrivenPolicy(resources=slots)
    assert not driver.see_for(0, 60, **full)
    assert driver.note == "queue delay 900 ms > 100 ms: no change is expected to help"
    assert DrivenPolicy(resources=replace(slots, costs=costs_of(1.6))).see_for(0, 1, **full)


def test_speed_is_judged_at_the_rows_that_run_now() -> None:
    """Fewer bits are faster with few rows only."""
    costs = FakeCosts(lambda precision, tokens: 1.0 if precision == "bfloat16" else 0.5 if tokens <= 16 else 1.5)
    for slots, changes in ((8, True), (64, False)):
        driver = DrivenPolicy(PERFORMANCE, resources=machine(max_num_seqs=slots, max_pages=401, costs=costs))
        queue = {"num_waiting": 2 * slots, "oldest_wait": 0.3, "num_running": slots, "kv_pages_used": 200}
        assert bool(driver.see_for(0, 1, **queue)) is changes


def test_slower_level_is_not_climbed_to_if_more_arrives_than_it_serves() -> None:
    """All layers in int4 have 2.2 times the pages, and take 4 times as long."""
    resources = replace(MACHINE, costs=costs_of(0.25))
    lasting = replace(CALM, arrivals_per_s=9.0)  # of 128 tokens, of the 800 tokens/s that full precision generates
    assert not DrivenPolicy(PERFORMANCE, resources=resources).press(0, 5, recent=lasting)
    little = replace(MACHINE, costs=costs_of(0.9))
    assert DrivenPolicy(PERFORMANCE, resources=little).press(0, 1, recent=replace(CALM, arrivals_per_s=1.0))


def test_running_sequences_do_not_pay_more_than_the_waiting_ones_gain() -> None:
    """All layers in int4 have room for the 9 that wait, and 40 would take 4 times as long."""
    resources = replace(MACHINE, costs=costs_of(0.25))
    assert not DrivenPolicy(PERFORMANCE, resources=resources).press(0, 5, recent=replace(CALM, arrivals_per_s=1.0))


def test_shortage_that_lasts_is_acted_on_though_each_sequence_starts_in_time() -> None:
    """Each that waits is expected to start within half of the objective, at every moment."""
    driver = DrivenPolicy(replace(TO_INT4, slo_ttft=8.0))
    assert driver.press(0, 0.4) == []
    assert "< 4000 ms" in driver.note
    assert driver.press(0.4, 0.6) == pytest.approx([0.6])


def test_loss_of_quality_must_pay() -> None:
    """The same relief, at a loss of 8 % in all layers, and at none."""
    for share, changed in ((0.0, True), (0.08, False)):
        loss = lambda precisions, share=share: share * sum(name == "int4" for name in precisions) / 2  # noqa: E731
        driver = DrivenPolicy(resources=replace(MACHINE, costs=costs_of(1.0)), loss=loss)
        assert bool(driver.press(0, 2)) is changed


def test_returns_of_pressure_soon_after_leaving_are_counted() -> None:
    """Full precision must be better by more each time before layers return."""
    state = MorphPolicy(FASTER, ORDER, TO_INT4).init(HOME)
    once = state.left(snapshot(10.0)).entered(12.0, TO_INT4)
    twice = once.left(snapshot(20.0)).entered(22.0, TO_INT4)
    later = twice.left(snapshot(30.0)).entered(200.0, TO_INT4)
    assert [each.returns for each in (state.entered(5.0, TO_INT4), once, twice, later)] == [0, 1, 2, 0]


def test_burst_that_starts_in_time_is_no_lasting_load() -> None:
    """The last of 4 is expected to start in time, but not if as many go on arriving."""
    lasting = replace(CALM, arrivals_per_s=20.0)
    assert DrivenPolicy(PERFORMANCE).press(0, 0.5, waiting=4, recent=lasting)
    assert not DrivenPolicy(PERFORMANCE).press(0, 0.5, waiting=4, recent=replace(lasting, seconds=0.5))


def test_time_per_token_above_its_objective_is_pressure_that_only_speed_relieves() -> None:
    settings = replace(TO_INT4, slo_tpot=0.04)
    running = {"num_running": 8, "kv_pages_used": 80, "recent": replace(CALM, tpot=0.05)}
    driver = DrivenPolicy(settings)
    assert driver.see_for(0, 1, **running)
    assert driver.reasons[0].startswith("TPOT 50 ms > 40 ms, ")
    for resources in (MACHINE, SLOWER):
        driver = DrivenPolicy(settings, resources=resources)
        assert not driver.see_for(0, 10, **running)
        assert driver.note == "TPOT 50 ms > 40 ms: no change is expected to help"


def test_segmented_pool_climbs_as_far_as_the_next_segment_needs() -> None:
    """A layer frees 30 pages."""
    driver = DrivenPolicy(resources=machine(max_pages=761, segments=(401, 100, 130, 130), costs=costs_of(1.0)))
    assert driver.press(0, 0.3) == [0.2]
    assert (len(int4(driver.plan)), driver.plan.kv_pages) == (4, 501)
    driver.press(1, 0.5, waiting=13)
    assert (len(int4(driver.plan)), driver.plan.kv_pages) == (8, 631)
    driver.see_for(10, 30)
    assert driver.plan == HOME


def test_kv_pressure_changes_layers_of_all_stages() -> None:
    """The first two layers of the order belong to the first stage: alone they free no pages, and a third one does."""
    driver = DrivenPolicy(plan=home_plan(pp=2).instances[0], resources=machine(pp=2, costs=costs_of(1.0)))
    assert driver.press(0, 0.5, waiting=9) == [0.2]
    assert int4(driver.plan) == [3, 7, 11]
    assert {stage.kv_pages for stage in driver.plan.stages} == {driver.resources.kv_capacity(driver.plan)}


def test_kv_pressure_on_a_pool_that_cannot_grow_changes_no_layer() -> None:
    driver = DrivenPolicy(resources=replace(MACHINE, max_pages=401))
    assert not driver.press(0, 5)
    assert driver.note.endswith(": no change is expected to help")
    assert DrivenPolicy(resources=replace(FASTER, max_pages=401)).press(0, 1), "fewer bits are faster, too"


def test_note_under_pressure_says_what_is_waited_for() -> None:
    driver = DrivenPolicy()
    driver.press(0, 0.2, wait=0.24)
    assert driver.note == "queue delay 240 ms > 100 ms, KV usage 100.0% > 85% for 0.1 s < 0.2 s"
    driver.press(0.2, 0.1)
    assert driver.note == ""
    driver.press(0.3, 0.2)
    assert driver.note.endswith(", 0.2 s after the last entry < 0.5 s")


def test_note_in_the_first_plan_without_pressure_is_empty() -> None:
    driver = DrivenPolicy()
    driver.see_for(0, 10, num_waiting=1, kv_pages_used=300, recent=replace(CALM, preemptions=1))
    assert driver.note == ""
    driver.press(10, 1)
    driver.see_for(20, 10)
    assert (driver.plan, driver.note) == (HOME, "")


def test_policy_without_load_changes_nothing() -> None:
    for settings in (ACCURACY, PERFORMANCE):
        assert not DrivenPolicy(settings).see_for(0, 300)


def test_infinite_queue_delay_leaves_kv_usage_as_the_only_pressure() -> None:
    driver = DrivenPolicy(replace(ACCURACY, queue_delay=float("inf")))
    assert not driver.see_for(0, 2, num_waiting=300, oldest_wait=60.0)
    assert driver.press(2, 2)


# -- the ladder


def test_performance_mode_changes_all_layers() -> None:
    driver = DrivenPolicy(PERFORMANCE)
    driver.press(0, 30, waiting=90)
    assert int4(driver.plan) == list(range(16))


def test_int8_mode_changes_all_layers_to_int8_only() -> None:
    driver = DrivenPolicy(INT8)
    driver.press(0, 30, waiting=90)
    assert set(driver.plan.layer_precisions) == {"int8"}
    assert driver.plan.kv_pages == MACHINE.kv_capacity(driver.plan)
    driver.see_for(30, 20)
    assert driver.plan == HOME


def test_accuracy_mode_goes_on_from_int8_to_int4_while_pressure_stays() -> None:
    """The layers that changed last are the first to return."""
    driver = DrivenPolicy(ACCURACY)
    driver.press(0, 0.3, waiting=18)
    assert [driver.plan.precision(f"layers.{n}") for n in ORDER[:8]] == ["int4"] * 4 + ["int8"] * 4
    driver.press(1, 10, waiting=90)
    assert set(driver.plan.layer_precisions) == {"int4"}
    driver.see_for(30, 5.1)
    assert [driver.plan.precision(f"layers.{n}") for n in ORDER] == ["int4"] * 9 + ["int8"] * 7
    driver.see_for(36, 14)
    assert driver.plan == HOME


def test_layers_stay_in_int8_if_escalation_is_switched_off() -> None:
    driver = DrivenPolicy(replace(ACCURACY, escalate=""))
    driver.press(0, 30, waiting=90)
    assert [driver.plan.precision(f"layers.{n}") for n in ORDER] == ["int4"] * 4 + ["int8"] * 12
    assert driver.note.endswith(": no change is left")


def test_last_resort_is_the_last_stage() -> None:
    driver = DrivenPolicy(replace(INT8, last_resort="int4"))
    driver.press(0, 0.3, waiting=32)
    assert set(driver.plan.layer_precisions) == {"int8"}, "its 320 pages are enough"
    driver.press(1, 30, waiting=90)
    assert set(driver.plan.layer_precisions) == {"int4"}


def test_floor_of_quality_stops_the_climb() -> None:
    def loss(precisions: object) -> float:
        return list(precisions).count("int4") / 100  # type: ignore[call-overload]

    driver = DrivenPolicy(replace(PERFORMANCE, max_quality_loss=0.05), loss=loss)
    driver.press(0, 30, waiting=90)
    assert int4(driver.plan) == sorted(ORDER[:5])


def test_reason_of_a_decision_with_two_precisions_names_both() -> None:
    driver = DrivenPolicy(replace(ACCURACY, most_layers=0.125, entry_layers=4))
    driver.press(0, 0.3, waiting=6)
    assert "layers 1, 11 to int8, layers 3, 7 to int4, KV" in driver.reasons[0]


@pytest.mark.parametrize(
    ("settings", "counts"), [(ACCURACY, [2, 8, 16]), (TO_INT4, [2, 8, 12]), (PERFORMANCE, [4, 16])]
)
def test_foresee_lists_the_plans_reached_under_pressure(settings: MorphSettings, counts: list[int]) -> None:
    policy = MorphPolicy(MACHINE, ORDER, settings)
    expected = [
        [settings.precision_at(place, 16) if place < count else "bfloat16" for place in range(16)] for count in counts
    ]
    if settings.second:
        expected.append([settings.second] * 16)
    for asked in (policy, chain(StaticPolicy(), policy)):
        foreseen = [plan.layer_precisions for plan in asked.foresee(HOME)]
        assert [[layers[layer] for layer in ORDER] for layers in foreseen] == expected
    assert list(chain(StaticPolicy()).foresee(HOME)) == []


def test_foresee_lists_the_highest_of_many_plans() -> None:
    policy = MorphPolicy(MACHINE, ORDER, replace(ACCURACY, precision="int8", escalate="int8", last_resort="int4"))
    foreseen = [plan.layer_precisions for plan in policy.foresee(HOME)]
    assert [len(set(layers)) for layers in foreseen] == [2, 2, 1, 1]
    assert len(foreseen) == MAX_FORESEEN


def test_layers_already_changed_or_outside_the_order_stay() -> None:
    plan = HOME.with_precisions({"layers.3": "int4"})
    driver = DrivenPolicy(PERFORMANCE, plan=plan, order=(3, 7, 11))
    driver.press(0, 30, waiting=90)
    assert int4(driver.plan) == [3, 7, 11]
    driver.see_for(30, 20)
    assert driver.plan == plan


# -- what others have done to the plan


def test_layers_larger_than_in_the_first_plan_change_back() -> None:
    """An operator's plan was in force. A layer in int4 leaves 30 pages more than one in bfloat16."""
    home = HOME.with_precisions({f"layers.{n}": "int4" for n in range(16)}).with_kv_pages(881)
    driver = DrivenPolicy(plan=home)
    driver.plan = home.with_precisions({f"layers.{n}": "bfloat16" for n in range(8)}).with_kv_pages(600)
    assert driver.see_for(0, 1) != []
    assert driver.plan == home


def test_pages_or_a_limit_that_differ_at_full_precision_return_at_once() -> None:
    driver = DrivenPolicy()
    driver.plan = HOME.with_kv_pages(300).with_max_num_seqs(4)
    assert driver.see_for(0, 1) == [0.0]
    assert driver.plan == HOME
    expected = "no layer has fewer bits: KV 300 -> 401 pages, at most 4 -> all sequences at once"
    assert driver.reasons == [expected]


def test_policy_continues_from_the_plan_in_force_after_failures() -> None:
    driver = DrivenPolicy()
    driver.press(0, 0.5, waiting=12)
    assert int4(driver.plan) == [1, 3, 7, 11]
    driver.plan = driver.plan.with_precisions({"layers.7": "bfloat16"}).with_kv_pages(450)
    driver.press(2, 0.5, waiting=90)
    assert {1, 3, 7, 11} < set(int4(driver.plan)), "it goes on with what has failed"
    assert driver.plan.kv_pages == MACHINE.kv_capacity(driver.plan)


# -- release


def test_recent_pressure_peak_delays_the_release() -> None:
    driver = DrivenPolicy()
    driver.press(0, 30, waiting=90)
    assert driver.see_for(40, 10, recent=replace(CALM, max_wait=0.3)) == []
    assert driver.see_for(50, 10, recent=replace(CALM, max_kv_usage=0.9)) == []
    assert driver.see_for(60, 1) != []


@pytest.mark.parametrize("settings", [ACCURACY, TO_INT4, PERFORMANCE])
def test_quiet_releases_all_layers_in_reverse_order_within_ten_seconds(settings: MorphSettings) -> None:
    driver = DrivenPolicy(settings)
    driver.press(0, 30, waiting=90)
    times = driver.see_for(30, 60)
    assert driver.plan == HOME
    assert len(times) <= 5
    assert times[0] == pytest.approx(35)
    assert times[-1] <= 37
    assert driver.reasons[-1].startswith(
        f"quiet for {times[-1] - 30:.1f} s >= 5 s, nothing waiting, mean queue 0.0 <= 0.5, no preemption in 5 s, "
        f"0 pages in use <= {settings.release_usage:.0%} of 400: layer"
    )


def test_reason_of_a_partial_release_says_what_limits_it() -> None:
    """The average use is named where it is larger than the present one."""
    driver = DrivenPolicy(PERFORMANCE)
    driver.press(0, 30, waiting=90)
    driver.see_for(30, 5.2, recent=replace(CALM, kv_usage=0.55), kv_pages_used=0)
    assert driver.reasons[-1].endswith(
        "484 pages in use on average <= 60% of 820: layers 12, 14 to bfloat16, KV 881 -> 821 pages; "
        "for more: 484 pages in use on average > 60% of 790"
    )


@pytest.mark.parametrize(
    ("blocking", "note"),
    [
        ({"num_waiting": 1}, "1 waiting > 0"),
        ({"recent": replace(CALM, waiting=0.6)}, "mean queue 0.6 > 0.5"),
        ({"recent": replace(CALM, preemptions=1)}, "preemptions in the last 5 s: 1 > 0"),
        # Of 760; of the 731 pages that would be left with one layer less 70 % are 511.
        ({"kv_pages_used": 512}, "512 pages in use > 70% of 730"),
        ({"recent": replace(CALM, kv_usage=512 / 760)}, "512 pages in use on average > 70% of 730"),
        ({"kv_pages_used": 400, "recent": replace(CALM, kv_trend=0.04)}, "552 pages in use in 5 s > 70% of 730"),
        ({"recent": replace(CALM, max_wait=0.3)}, "queue delay in the last 5 s: 300 ms > 100 ms"),
        ({"recent": replace(CALM, max_kv_usage=0.9)}, "KV usage in the last 5 s: 90.0% > 85%"),
        (
            {"num_running": 40, "kv_pages_used": 200, "recent": replace(CALM, arrivals_per_s=28.0)},
            "3584 tokens/s asked for > 90% of the estimated",
        ),
    ],
)
def test_blocked_release_keeps_layers_and_notes_the_reason(blocking: dict[str, object], note: str) -> None:
    driver = DrivenPolicy()
    driver.press(0, 30, waiting=90)
    assert not driver.see_for(30, 20, **blocking)
    assert driver.note.startswith(note)
    driver.see_for(50, 10)
    assert driver.plan == HOME


def test_release_under_load_keeps_the_usage_margin() -> None:
    driver = DrivenPolicy()
    driver.press(0, 30, waiting=90)
    for number in range(300):
        driver.see(snapshot(30 + number / 10, pages=driver.plan.kv_pages - 1, kv_pages_used=330))
    assert int4(driver.plan) == [3, 7, 11]
    assert driver.plan.kv_pages == 491, "330 is below 70 % of 490, and above 70 % of the 460 that come next"


# -- memory of relapses


def test_release_after_a_relapse_waits_for_lower_arrivals() -> None:
    steady = replace(CALM, arrivals_per_s=2.0)
    driver = DrivenPolicy()
    driver.press(0, 1)
    assert driver.see_for(10, 10, recent=steady), "released, with two arrivals a second"
    assert driver.plan == HOME
    assert driver.press(20, 1, recent=steady), "which was a mistake"
    assert not driver.see_for(21, 3, recent=steady)
    assert driver.note == "quiet for 2.9 s < 5 s"
    assert not driver.see_for(24, 297, recent=steady)
    assert driver.note == "held after a relapse: 2.0 arrivals/s > 75% of 2.0, for 299 s more"
    assert not driver.see_for(321, 60, recent=replace(CALM, arrivals_per_s=1.55))
    assert driver.see_for(381, 1, recent=replace(CALM, arrivals_per_s=1.45))


def test_hold_after_a_relapse_expires() -> None:
    steady = replace(CALM, arrivals_per_s=2.0)
    driver = DrivenPolicy()
    driver.press(0, 0.5, waiting=6)
    driver.see_for(10, 10, recent=steady)
    (entry,) = driver.press(20, 0.5, waiting=6, recent=steady)
    (release,) = driver.see_for(21, 700, recent=steady)
    assert release - entry == pytest.approx(600, abs=0.2)


def test_relapse_under_risen_load_does_not_hold_the_next_release() -> None:
    low, high = replace(CALM, arrivals_per_s=1.0), replace(CALM, arrivals_per_s=4.0)
    driver = DrivenPolicy()
    for start in range(0, 200, 20):
        assert driver.press(start, 5, recent=high)
        driver.see_for(start + 5, 15, recent=low)
        assert driver.plan == HOME


def test_relapse_after_a_release_without_arrivals_does_not_hold_the_next() -> None:
    driver = DrivenPolicy()
    driver.press(0, 1)
    driver.see_for(10, 10)
    assert driver.press(20, 1), "long answers fill the cache again"
    assert driver.see_for(21, 10, recent=replace(CALM, arrivals_per_s=1.0))


# -- leaving what does not help


def steps(busy: float, expected: float, **values: object) -> dict[str, object]:
    """Return values of a snapshot after steps that took `busy` seconds instead of `expected` ones."""
    return {"busy_seconds": busy, "expected_seconds": expected, **values}


def slots(speedup: float) -> Resources:
    """Return a machine that is short of slots."""
    return machine(max_num_seqs=16, costs=costs_of(speedup))


FULL_SLOTS = {"num_running": 16, "kv_pages_used": 160, "num_waiting": 12, "oldest_wait": 0.9}


def entered(busy: float) -> DrivenPolicy:
    """Return a policy that has changed layers, after steps that took `busy` times what it expected of fewer bits."""
    driver = DrivenPolicy(PERFORMANCE, resources=slots(1.6))
    driver.see_for(0, 1, **steps(10.0, 10.0, **FULL_SLOTS))
    assert int4(driver.plan) == list(range(16))
    driver.see_for(1, 0.1, **steps(10.0, 10.0, **FULL_SLOTS))
    driver.see_for(5, 1, **steps(10.0 + 3.0 * busy, 13.0, **FULL_SLOTS))
    return driver


def test_layers_return_at_once_if_steps_turn_out_slower() -> None:
    driver = entered(2.0)
    assert driver.plan == HOME
    assert re.match(
        r"answers are expected \d\.\d\d times as late as in full precision: layers 0, 1,", driver.reasons[-1]
    )
    assert entered(1.0).plan != HOME, "steps are as fast as expected"
    assert entered(1.7).plan != HOME, "6 % slower than full precision are not yet worth another change"


def test_mistake_is_remembered_for_ten_minutes() -> None:
    driver = entered(2.0)
    full = steps(20.0, 17.0, **FULL_SLOTS)
    assert not driver.see_for(6, 590, **full)
    assert driver.note.endswith(": no change is expected to help")
    assert driver.see_for(604, 10, **full)


def test_too_little_evidence_changes_nothing() -> None:
    driver = DrivenPolicy(PERFORMANCE, resources=slots(1.6))
    driver.see_for(0, 1.1, **steps(10.0, 10.0, **FULL_SLOTS))
    assert not driver.see_for(2, 1, **steps(11.9, 10.6, **FULL_SLOTS))
    assert driver.see_for(3, 1, **steps(14.0, 10.8, **FULL_SLOTS))


def test_fewer_sequences_run_until_their_pages_fit_into_full_precision() -> None:
    driver = DrivenPolicy(PERFORMANCE, resources=machine(max_num_seqs=88, costs=costs_of(1.6)))
    driver.press(0, 2, waiting=60, **steps(10.0, 10.0))
    assert driver.plan.kv_pages == 881
    harm = steps(100.0, 20.0, num_waiting=300, oldest_wait=3.0)
    assert driver.see_for(5, 0.1, num_running=88, kv_pages_used=880, **harm)
    assert (driver.plan.max_num_seqs, driver.plan.kv_pages) == (40, 881)
    assert driver.reasons[-1].endswith("in full precision: at most all -> 40 sequences at once")
    assert not driver.see_for(6, 1, num_running=60, kv_pages_used=600, **harm)
    assert driver.note.endswith(", but 600 pages in use > 400")
    assert driver.see_for(7, 0.1, num_running=40, kv_pages_used=400, **harm)
    assert driver.plan == HOME


def test_slower_level_that_falls_behind_is_left_before_the_queue_is_long() -> None:
    """Its room starts some sequences now, and full precision more of them later."""
    driver = DrivenPolicy(PERFORMANCE, resources=machine(max_num_seqs=64, costs=costs_of(0.5)))
    driver.press(0, 2, waiting=24, recent=replace(CALM, arrivals_per_s=1.0), **steps(10.0, 10.0))
    driver.plan = driver.state.ladder.plan(16)
    driver.see_for(5, 0.1, **steps(10.0, 10.0))
    queue = {"num_running": 64, "kv_pages_used": 640, "num_waiting": 100, "oldest_wait": 3.0}
    assert driver.see_for(11, 1, recent=replace(CALM, arrivals_per_s=9.0), **steps(20.0, 20.0, **queue))
    assert driver.plan.max_num_seqs == 40


# -- sequences at once


def test_few_sequences_run_while_first_tokens_come_in_time() -> None:
    """More pages have room for 46 sequences. Full precision ran 40."""
    driver = DrivenPolicy()
    driver.press(0, 0.3, waiting=6)
    running = {"num_running": 45, "kv_pages_used": 450, "recent": replace(CALM, arrivals_per_s=1.0)}
    assert driver.see_for(6, 1, **running)
    assert (driver.plan.max_num_seqs, driver.plan.kv_pages) == (40, 461)
    assert not driver.see_for(7, 1, **running), "no other limit soon"
    assert driver.see_for(8, 1, num_waiting=1, oldest_wait=0.6, **running)
    assert driver.plan.max_num_seqs is None, "a sequence has waited for a quarter of the objective"


def test_limit_on_sequences_leaves_room_for_the_load() -> None:
    driver = DrivenPolicy(PERFORMANCE)
    driver.press(0, 5)
    running = {"num_running": 88, "kv_pages_used": 880}
    driver.see_for(10, 1, recent=replace(CALM, arrivals_per_s=10.0), **running)
    assert driver.plan.max_num_seqs is not None
    speed = driver.plan.max_num_seqs / (0.05 * (1 - driver.state.level / 16 + driver.state.level / 16 / 1.6))
    assert 1.2 * 10 * 128 <= speed < 1.5 * 10 * 128


def test_sequences_are_not_limited_if_few_is_switched_off() -> None:
    driver = DrivenPolicy(replace(TO_INT4, few=False))
    driver.press(0, 0.3, waiting=6)
    assert not driver.see_for(6, 10, num_running=45, kv_pages_used=450)
    assert driver.plan.max_num_seqs is None


# -- settings


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
        ("release_capacity", 1.1),
        ("min_gain", 0.9),
        ("hold", 0.0),
        ("slo_tpot", 0.0),
        ("max_quality_loss", -0.1),
    ],
)
def test_settings_outside_their_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}: it must be"):
        replace(ACCURACY, **{name: value})
