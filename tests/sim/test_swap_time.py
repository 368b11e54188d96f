"""On a large GPU many layers change their precision in a few steps' time."""

from math import inf
from pathlib import Path

import pytest

from jaxserve.control.reconfigure import Reconfiguration
from jaxserve.core.config import EngineConfig
from jaxserve.planning.memory import COPY_RATES, copy_pace
from jaxserve.sim.build import build_simulation
from jaxserve.sim.cluster import resolve_cluster
from jaxserve.sim.hardware import load_hardware
from jaxserve.sim.shape import ModelShape
from jaxserve.sim.simulation import SimRequest

SIXTEEN = """
from jaxserve.control.policy import Proposal

LAYERS = {f"layers.{index}": "int4" for index in range(16)}

class Sixteen:
    name = "sixteen"
    precisions = ("int4",)

    def __init__(self, resources, swap_order):
        pass

    def init(self, plan):
        return None

    def update(self, snapshot, plan, state):
        return Proposal(plan if snapshot.time < 3 else plan.with_precisions(LAYERS), state, "")
"""
LLAMA = ModelShape.load("llama-3-8b")


@pytest.mark.parametrize("hardware", ["h100", "h200"])
def test_the_swap_buffer_holds_a_change_of_many_layers(hardware: str) -> None:
    memory = resolve_cluster(EngineConfig(policy="morph-performance"), LLAMA, load_hardware(hardware)).memory
    (layer,) = {size for (_, precision), size in memory.layer_bytes.items() if precision == "int4"}
    entries = memory.ledger.entries
    assert entries["exchange"] >= 8 * layer
    assert entries["exchange"] <= 0.019 * (entries["kv"] + entries["exchange"]) * 1.01


@pytest.mark.parametrize("policy", ["morph", "morph-performance"])
@pytest.mark.parametrize(("hardware", "memory_gb"), [("l4", None), ("h200", 24.0), ("h200", None)])
def test_adaptation_begins_with_the_pages_of_full_precision(
    policy: str, hardware: str, memory_gb: float | None
) -> None:
    """On a small GPU no layer fits into the share of the memory that the swap buffer may take, so there is none."""
    alone, adapting = (
        resolve_cluster(EngineConfig(memory_gb=memory_gb, **given), LLAMA, load_hardware(hardware)).memory
        for given in ({}, {"policy": policy})
    )
    assert alone.plan.instances[0].kv_pages >= adapting.plan.instances[0].kv_pages
    assert adapting.plan.instances[0].kv_pages >= 0.98 * alone.plan.instances[0].kv_pages
    assert ("exchange" in adapting.ledger.entries) == (memory_gb is None and hardware == "h200")


@pytest.mark.parametrize("hardware", ["h100", "l4"])
def test_copies_on_a_gpu_go_as_fast_as_its_link(hardware: str) -> None:
    device = load_hardware(hardware)
    assert resolve_cluster(EngineConfig(policy="morph"), LLAMA, device).copy_rate == device.links["pcie"].bandwidth


@pytest.mark.parametrize(("name", "limit"), [("h100", 0.070), ("h200", 0.050)])
def test_sixteen_layers_change_within_few_steps(
    name: str, limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their copies take 35 ms. The buffer of an H100 does not hold all, and each of three batches waits for a step."""
    seconds, carry_out = [], Reconfiguration.carry_out

    def timed(procedure, transitions, report):
        began = procedure.now()
        yield from carry_out(procedure, transitions, report)
        seconds.append(procedure.now() - began)

    monkeypatch.setattr(Reconfiguration, "carry_out", timed)
    (tmp_path / "sixteen.py").write_text(SIXTEEN)
    config = EngineConfig(policy=f"{tmp_path / 'sixteen.py'}:Sixteen", variants=("int4",))
    built = build_simulation(
        resolve_cluster(config, LLAMA, load_hardware(name)), detailed=False, interval=0.5, model_folder=None
    )
    requests = [SimRequest(0.0, 500, 1000)] * 64
    for ended, _ in enumerate(built.simulation.run(requests), 1):
        if ended == len(requests):
            built.sampler.finish()
    assert built.control is not None
    (decision,) = built.control.decisions
    assert len(decision.transitions) == 16
    assert all(outcome.error is None for outcome in built.control.outcomes)
    assert 0.030 <= seconds[0] <= limit


def test_only_copies_that_share_the_steps_memory_are_paced() -> None:
    assert copy_pace("cpu") == COPY_RATES["cpu"]
    assert copy_pace("gpu") == inf
