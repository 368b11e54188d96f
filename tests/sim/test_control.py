"""Policies in virtual time: layers give their memory to KV pages under load, and return after it."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.calibration.sensitivity import SensitivityProfile
from jaxserve.calibration.sensitivity.order import sensitivity
from jaxserve.control.record import Decision
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.errors import ConfigError
from jaxserve.sim.build import BuiltSimulation, build_simulation
from jaxserve.sim.control import SETTLING
from jaxserve.sim.hardware import Hardware, Overheads
from jaxserve.sim.simulation import Answered, SimRequest
from tests.sim.machines import CPU, GPU, resolved

BUNDLED = bundled_model_path()
PROFILE = SensitivityProfile.load(BUNDLED / "sensitivity.json")
TIGHT = {"kv_pages": 60, "max_kv_pages": 400, "max_model_len": 512, "memory_gb": 1.036}
MORPH = {"policy": "morph-performance", "slo_ttft": 0.2}
BURST = [SimRequest(5 + 0.02 * number, 200, 60) for number in range(150)]
SPY = """
from jaxserve.control.policy import Proposal

SEEN = []

class Spy:
    name = "spy"

    def __init__(self, resources, swap_order):
        SEEN.append((resources, swap_order))

    def init(self, plan):
        return None

    def update(self, snapshot, plan, state):
        SEEN.append((plan.name, snapshot.time))
        return Proposal(plan, state, "")
"""


def run(hardware: Hardware = CPU, **options) -> tuple[BuiltSimulation, list[Answered]]:
    """Simulate a burst, and return the simulation and the results of its requests."""
    cluster = resolved(hardware, **TIGHT | options)
    built = build_simulation(cluster, detailed=False, interval=0.5, model_folder=BUNDLED)
    ended = []
    for answered in built.simulation.run(BURST):
        ended.append(answered)
        if len(ended) == len(BURST):
            built.sampler.finish()
    return built, ended


def changed(decision: Decision, precision: str) -> set[int]:
    """Return the layers that a decision changed to a precision."""
    words = [text.split() for text in decision.transitions if f"-> {precision}" in text]
    return {int(layer.removeprefix("layers.")) for _, _, layer, *_ in words}


def test_a_burst_has_layers_swapped_and_pages_added_and_all_comes_back() -> None:
    built, ended = run(**MORPH)
    assert len(ended) == len(BURST)
    assert built.control is not None
    sampled = built.sampler.series()
    assert max(sampled['layers_by_precision{precision="int4"}']) > 0
    assert sampled["kv_pages_total"][0] == 60 < max(sampled["kv_pages_total"])
    assert [decision.outcome for decision in built.control.decisions] == ["done"] * len(built.control.decisions)
    assert sampled["plan_version"][-1] > 3
    instance = built.simulation.front.instances["0"]
    assert instance.core.snapshot.kv_pages_total == 60
    assert instance.core.snapshot.layers_by_precision == {"bfloat16": 8}
    last = max(answered.last_token for answered in ended)
    assert last < built.control.settled_since < last + SETTLING
    assert sampled["t"][-1] <= built.control.settled_since  # sampling ends when the plan has settled


def test_morphing_serves_a_burst_sooner_than_a_static_plan() -> None:
    waits = []
    for options in (MORPH, {}):
        built, ended = run(**options)
        assert (built.control is None) == (not options)
        waits.append(sum(answered.first_token - answered.request.arrival for answered in ended) / len(ended))
    assert waits[0] < waits[1]


def test_first_layer_of_the_profile_goes_first_and_comes_back(tmp_path: Path) -> None:
    """It frees as many pages as the pools may have, so that no other layer need change."""
    (tmp_path / "policy.yaml").write_text("policy: morph\nsettings: {escalate: '', few: false}")
    built, _ = run(policy=str(tmp_path / "policy.yaml"), slo_ttft=0.2)
    into, *_, back = built.control.decisions
    first = set(PROFILE.order("int4")[:1])
    assert changed(into, "int4") == changed(back, "bfloat16") == first
    assert not changed(into, "int8")


@pytest.mark.parametrize("hardware", [CPU, GPU])
def test_the_policy_is_asked_at_every_tick_and_sees_all_instances(tmp_path: Path, hardware: Hardware) -> None:
    (tmp_path / "spy.py").write_text(SPY)
    cluster = resolved(hardware, dp=2, policy=f"{tmp_path / 'spy.py'}:Spy", variants=("int4",))
    built = build_simulation(cluster, detailed=False, interval=0.0, model_folder=None)
    list(built.simulation.run(BURST[:3]))
    (resources, order), *ticks = sys.modules["user_file_spy"].SEEN
    assert resources == cluster.resources
    assert order == (1, 0, 2, 3, 4, 5, 6, 7)
    for name in ("0", "1"):
        times = [time for instance, time in ticks if instance == name]
        assert times == pytest.approx([0.1 * number for number in range(len(ticks) // 2)])
    assert ticks[-1][1] == pytest.approx(5 + SETTLING, abs=1)  # the sampler was not told that no more requests come


def test_what_is_compiled_late_costs_time() -> None:
    slow = replace(CPU, overheads=Overheads(compile=3.0))
    warm, cold = (run(slow, warmup=warmup, **MORPH)[0].control.decisions for warmup in (True, False))
    assert warm[0].time == cold[0].time
    assert cold[1].time > warm[1].time


def test_each_batch_costs_the_hosts_time() -> None:
    slow = replace(CPU, overheads=Overheads(transition=0.04))
    fast, late = (run(hardware, **MORPH)[0].control for hardware in (CPU, slow))
    assert fast.outcomes
    assert all(outcome.seconds > 0.0399 for outcome in late.outcomes)
    done = [sum(len(decision.transitions) for decision in control.decisions) for control in (fast, late)]
    assert done == [len(fast.outcomes), len(late.outcomes)]


def test_swaps_begin_with_the_first_layers_without_a_profile(tmp_path: Path) -> None:
    assert sensitivity(BUNDLED, 8, ("int4", "bfloat16"), None).swap_order == PROFILE.order("int4")
    assert sensitivity(tmp_path, 5, ("int4",), None).swap_order == (0, 1, 2, 3, 4)
    with pytest.raises(ConfigError, match="8 layers, this one has 9"):
        sensitivity(BUNDLED, 9, ("int4",), None)
    with pytest.raises(ConfigError, match="other weights"):
        sensitivity(BUNDLED, 8, ("int4",), lambda: "0" * 64)


def test_a_policy_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy is 'morfh'"):
        build_simulation(resolved(CPU, policy="morfh"), detailed=False, interval=0.0)
