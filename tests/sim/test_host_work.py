"""The host's work bounds the steps of a simulated instance, and a measured burst is reproduced with it."""

from dataclasses import replace

import pytest

from bench.sim import gpu_adaptation, gpu_burst
from jaxserve.control.plan import block_chain, parallel_plan
from jaxserve.core.step_load import StepLoad
from jaxserve.sim.hardware import Overheads, load_hardware
from jaxserve.sim.host_work import PATIENCE, HostWork
from tests.support.thorough import some

COSTS = Overheads(loop=1.0, program=0.1, array=0.01, answer=0.5)
LOAD = StepLoad(8, 8, 3, 100, 0)


def plan(*precisions: str):
    chain = block_chain("bfloat16", precisions, "bfloat16")
    return parallel_plan(chain, kv_pages=9, tp=1, pp=1, dp=1, devices=1).instances[0]


def test_work_is_that_of_programs_arrays_and_answers() -> None:
    work = HostWork(COSTS, fused=None)
    assert work.seconds(plan("bfloat16", "bfloat16"), LOAD, 0.0) == pytest.approx(1 + 0.1 * 6 + 0.01 * 12 + 0.5 * 3)
    assert work.seconds(plan("bfloat16", "int4"), LOAD, 0.0) == pytest.approx(1 + 0.1 * 6 + 0.01 * 16 + 0.5 * 3)
    fused = HostWork(COSTS, fused=plan("bfloat16", "int4"))
    assert fused.seconds(plan("bfloat16", "int4"), LOAD, 0.0) == pytest.approx(1 + 0.1 * 2 + 0.01 * 16 + 0.5 * 3)
    other, mixed = plan("bfloat16", "bfloat16"), replace(LOAD, tokens=72)
    assert fused.seconds(other, LOAD, 0.0) == work.seconds(other, LOAD, 0.0), "only the first plan is fused"
    assert fused.seconds(plan("bfloat16", "int4"), mixed, 0.0) == work.seconds(plan("bfloat16", "int4"), mixed, 0.0)


def test_shapes_that_are_used_often_are_fused_one_after_another() -> None:
    work, layers = HostWork(replace(COSTS, fuse=5.0, stall=0.5), fused=None), plan("bfloat16", "bfloat16")
    other = replace(LOAD, tokens=16, rows=16)
    block, *_ = [work.seconds(layers, LOAD, 1.0) for _ in range(PATIENCE)]
    for _ in range(PATIENCE):
        work.seconds(layers, other, 1.5)
    assert work.seconds(layers, LOAD, 1.5) == pytest.approx(block + 0.5), "nothing else goes on until 2"
    assert work.seconds(layers, LOAD, 3.0) == block
    assert work.seconds(layers, LOAD, 11.0) == pytest.approx(block - 0.1 * 4 + 1.0), "fused; the other one's turn"
    assert not work.is_settled(layers, LOAD, 12.5)
    assert work.is_settled(layers, LOAD, 21.0)
    assert work.is_settled(layers, other, 21.0)


def test_no_work_costs_nothing() -> None:
    assert HostWork.of(Overheads(), fused=None) is None
    assert HostWork.of(load_hardware("h200").overheads, fused=None) is not None


# The P95 of full precision's first tokens depends on few requests that waited for pages, and some milliseconds decide.
ALLOWED = {("full", "P95 TTFT"): 0.45}


@pytest.mark.parametrize("system", some(["int4", "full", "morph"], 1))
def test_measured_burst_is_reproduced(system: str) -> None:
    real, found = gpu_burst.measured(system), gpu_burst.simulated(system, (0.0, 0.022, 0.044))
    off = {name: found[name] / real[name] - 1 for name in gpu_burst.FIGURES}
    assert {name: error for name, error in off.items() if abs(error) > ALLOWED.get((system, name), 0.2)} == {}


# Missed by the policy: it expects faster steps of changed layers than the host's work on their arrays and answers lets
# them be, and corrects that after the change.
LATER = pytest.mark.xfail(strict=True, reason="answers are 1.20x later")
CASES = [(1.3, 1), (0.8, 0), (0.9, 1), (1.0, 2), pytest.param(1.0, 1, marks=LATER)]


@pytest.mark.parametrize(("rate", "seed"), some(CASES, 1))
def test_answers_are_no_later_than_without_adaptation(rate: float, seed: int) -> None:
    case = gpu_adaptation.Case("h200", 1, rate, seed)
    results = {system: case.run(system) for system in gpu_adaptation.SYSTEMS}
    assert gpu_adaptation.compared(results)[0] <= 1.05
