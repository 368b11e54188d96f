"""Stages of a simulated instance compute different steps at once, at the times of the real step loop."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from jaxserve.control import block_chain, parallel_plan
from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.step_load import Loads, StepLoad
from jaxserve.core.step_shapes import Buckets
from jaxserve.core.work import StepOutput, Work
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.core import EngineCore
from jaxserve.engine.directory import Entry
from jaxserve.engine.loop import StepLoop
from jaxserve.kvcache import PagePool, PageTable
from jaxserve.scheduler import SchedulerLimits
from jaxserve.scheduler.chunk_cost import ChunkCost
from jaxserve.scheduler.pipelined import PipelinedScheduler
from jaxserve.sim.cluster import Cluster, resolve_cluster
from jaxserve.sim.hardware import load_hardware
from jaxserve.sim.instance import SimInstance
from jaxserve.sim.maker import SimMaker
from jaxserve.sim.pipeline import Interval, Pipeline, StageTime, bubbles
from jaxserve.sim.shape import ModelShape
from jaxserve.telemetry import EngineMetrics, Snapshot

TILE, PAGE, STAGES, LONGEST = 8, 4, 2, 400
BUCKETS = Buckets(8, 4, TILE, 1, (LONGEST // PAGE,), finer=True)
PLAN = parallel_plan(
    block_chain("bfloat16", ["bfloat16"] * 2, "bfloat16"), kv_pages=400, tp=1, pp=STAGES, dp=1, devices=STAGES
).instances[0]


@dataclass(frozen=True)
class Formula:
    """Step times of two stages, of which the second takes longer (`TrueCostModel`, `TruePipelineCost`)."""

    host: float = 0.25
    per_context: float | None = 0.003

    def of(self, instance: object) -> "Formula":
        return self

    def seconds(self, load: StepLoad) -> float:
        return sum(time.seconds + time.hand_off for time in self.stages(load))

    def stages(self, load: StepLoad) -> list[StageTime]:
        each = 1 + 0.1 * load.tokens + 0.001 * load.prefill
        return [StageTime(each, 0.125), StageTime(1.25 * each, 0.0)]


def core() -> EngineCore:
    scheduler = PipelinedScheduler(
        SchedulerLimits(8, 4, TILE, PAGE),
        PagePool(400, caching=False),
        PageTable(8, LONGEST // PAGE),
        microbatches=STAGES + 1,
        cost=ChunkCost(1e-3, 0.1, 1.0),
    )
    info = ModelInfo("small", LONGEST, 100, 8, 0, max_queued_requests=100)
    return EngineCore(scheduler, info, None, EngineMetrics("small"), plan_fields=Snapshot(), stages=STAGES)


def requests() -> list[Request]:
    rng = np.random.default_rng(0)
    return [
        Request(str(n), (n,) * int(rng.integers(1, 300)), SamplingParams(max_tokens=int(rng.integers(2, 40))), 0.0)
        for n in range(12)
    ]


@dataclass
class VirtualStages:
    """An executor whose stages compute in virtual time, written apart from `Pipeline`."""

    clock: VirtualClock
    free: list[float] = field(default_factory=lambda: [0.0] * STAGES)
    intervals: list[list[Interval]] = field(default_factory=list)

    def execute(self, work: Work) -> "VirtualStep":
        times, at = Formula().stages(Loads(BUCKETS).of(work)), self.clock.time
        self.intervals.append([])
        for stage, time in enumerate(times):
            start = at if at > self.free[stage] else self.free[stage]
            at = self.free[stage] = start + time.seconds
            self.intervals[-1].append(Interval(start, at))
            at += time.hand_off
        return VirtualStep(self.clock, self.intervals[-1][-1].end, len(work.decodes) + len(work.chunks))


@dataclass
class VirtualStep:
    clock: VirtualClock
    end: float
    rows: int

    def sample(self) -> None:
        pass

    def fetch(self) -> StepOutput:
        self.clock.time = max(self.clock.time, self.end)
        return StepOutput(np.zeros(self.rows, np.int32))


def test_an_instance_of_stages_keeps_the_times_of_the_real_step_loop() -> None:
    clock, formula = VirtualClock(), Formula(host=0.0)
    real = core()
    stages = VirtualStages(clock)
    loop = StepLoop(real, stages, clock, stages=STAGES)
    for request in requests():
        loop.add(request)
    ended: dict[str, float] = {}
    while not loop.idle:
        ended |= {output.request_id: clock.time for output in loop.step() if output.finished}

    clock = VirtualClock()
    instance = SimInstance(core(), PLAN, formula, BUCKETS, clock)
    for request in requests():
        instance.submit(Entry(request, None, 0))
    found: dict[str, float] = {}
    while not instance.idle:
        clock.time = instance.wake
        found |= {output.request_id: clock.time for output in instance.advance() if output.finished}
    assert found == pytest.approx(ended)
    assert len(found) == 12
    assert instance.core.snapshot.steps == real.snapshot.steps
    first, second = ([step[stage] for step in stages.intervals] for stage in range(STAGES))
    overlapping = [after.start < before.end for after, before in zip(first[1:], second, strict=False)]
    assert sum(overlapping) > 0.8 * len(overlapping)


def test_bubbles_are_the_idle_time_of_stages_while_there_is_work() -> None:
    pipeline = Pipeline(2)
    assert bubbles([pipeline]) is None
    one, other = StageTime(2.0, 0.5), StageTime(3.0, 0.0)
    assert pipeline.dispatch(10.0, [one, other]) == [Interval(10.0, 12.0), Interval(12.5, 15.5)]
    assert pipeline.dispatch(10.0, [one, other]) == [Interval(12.0, 14.0), Interval(15.5, 18.5)]
    pipeline.dispatch(100.0, [one, other])  # the time before it was without work
    assert pipeline.span == 8.5 + 5.5
    assert bubbles([pipeline]) == pytest.approx(1 - (3 * 5.0) / (2 * 14.0))


def pipelined_cluster(microbatches: str) -> Cluster:
    config = EngineConfig(pp=4, memory_gb=20, microbatches=microbatches)  # type: ignore[arg-type]
    return resolve_cluster(config, ModelShape.load("qwen2.5-14b"), load_hardware("a800"))


def bubbles_of(microbatches: str, lengths: Sequence[int]) -> float:
    """Return the bubbles of an instance that serves a burst of prompts of these lengths."""
    cluster, clock = pipelined_cluster(microbatches), VirtualClock()
    maker = SimMaker(cluster, EngineMetrics("model"), clock, None)
    instance = maker.make(cluster.memory.plan.instances[0])
    for number, length in enumerate(lengths):
        params = SamplingParams(max_tokens=32, ignore_eos=True)
        instance.submit(Entry(Request(str(number), (number,) * length, params, 0.0), None, 0))
    while not instance.idle:
        clock.time = instance.wake
        list(instance.advance())
    share = bubbles(maker.pipelines)
    assert share is not None
    return share


def test_stages_together_take_the_time_of_a_step() -> None:
    cluster = pipelined_cluster("lookahead")
    cost = cluster.true_costs.of(cluster.memory.plan.instances[0])
    load = StepLoad(tokens=576, rows=64, sequences=40, context=9000, prefill=400_000)
    stages = cost.stages(load)  # type: ignore[attr-defined]
    assert len(stages) == 4
    assert sum(time.seconds + time.hand_off for time in stages) == pytest.approx(cost.seconds(load))


def test_equal_cost_leaves_fewer_bubbles_than_equal_tokens() -> None:
    lengths = [30_000, 200, 300, 250, 20_000, 400, 150, 25_000] * 3
    by_cost, by_tokens = bubbles_of("lookahead", lengths), bubbles_of("tokens", lengths)
    assert by_cost < 0.9 * by_tokens
