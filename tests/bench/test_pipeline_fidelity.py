"""The comparison of a real pipeline with its simulation: what is replayed, and what is counted."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from bench.sim.pipeline_fidelity import (
    COST,
    FIGURES,
    SLOWER,
    StageFormula,
    figures,
    replayed,
    requests,
    sim_instance,
    simulated,
)
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.step_load import Loads, StepLoad
from jaxserve.core.work import StepOutput, Work
from jaxserve.engine.loop import StepLoop
from jaxserve.planning.resolve import resolve


@dataclass
class StagesInVirtualTime:
    """An executor of two stages, which compute in virtual time."""

    clock: VirtualClock
    loads: Loads
    free: list[float] = field(default_factory=lambda: [0.0, 0.0])
    end: float = 0.0

    def execute(self, work: Work) -> "StepInVirtualTime":
        at = self.clock.time
        for stage, time in enumerate(StageFormula().stages(self.loads.of(work))):
            at = self.free[stage] = max(at, self.free[stage]) + time.seconds
        return StepInVirtualTime(self.clock, at, len(work.decodes) + len(work.chunks))

    def settle(self) -> None:
        pass


@dataclass
class StepInVirtualTime:
    clock: VirtualClock
    end: float
    rows: int

    def sample(self) -> None:
        pass

    def fetch(self) -> StepOutput:
        self.clock.time = max(self.clock.time, self.end)
        return StepOutput(np.zeros(self.rows, np.int32))


@pytest.mark.parametrize("mode", ["lookahead", "tokens"])
def test_a_step_loop_in_virtual_time_has_the_figures_of_the_simulation(mode: str) -> None:
    config = EngineConfig(
        model=bundled_model_path(),
        pp=2,
        microbatches=mode,  # type: ignore[arg-type]
        microbatch_cost=f"{COST.a},{COST.b},{COST.g}",
        max_num_seqs=8,
        max_num_batched_tokens=136,
        memory_gb=4,
    )
    memory, sent = resolve(config), requests(40, 2.0, 0.0)
    world = sim_instance(memory)
    found = figures([(sent, simulated(world, sent))])

    clock = VirtualClock()
    loop = StepLoop(
        sim_instance(memory).instance.core, StagesInVirtualTime(clock, Loads(memory.buckets)), clock, stages=2
    )
    replay = replayed(loop, sent, lambda _, moment: setattr(clock, "time", moment))
    assert figures([(sent, replay)]) == pytest.approx(found, rel=0.01)


def test_stages_take_what_the_formula_says() -> None:
    first, second = StageFormula().stages(StepLoad(tokens=40, rows=8, sequences=8, context=1000, prefill=5000))
    assert first.seconds == pytest.approx(COST.g + 40 * COST.b + 6000 * COST.a)
    assert second.seconds == pytest.approx(SLOWER * first.seconds)


def test_figures_are_those_of_requests_and_not_of_tokens() -> None:
    sent = [Request(str(n), (1,), SamplingParams(max_tokens=3), float(n)) for n in range(2)]
    found = figures([(sent, {"0": [1.0, 2.0, 3.0], "1": [4.0, 4.5, 5.0]})] * 2)
    assert dict(zip(FIGURES, found.values(), strict=True)) == pytest.approx(
        {"tokens/s": 1.2, "P50 TTFT, ms": 2000, "P99 TTFT, ms": 3000, "P50 TPOT, ms": 750, "P99 TPOT, ms": 1000}
    )
