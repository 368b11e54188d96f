"""How well the simulator predicts an instance of two stages, which compute different steps at once.

    python -m bench.sim.pipeline_fidelity [--requests N] [--rate R] [--rounds N] [--out FILE]

A real engine of the bundled model runs on two virtual devices of the CPU. Each stage of each step takes as long as a
formula of the step's load says (`bench.sim.delayed_stages`), because two busy cores would compute neither stage evenly.
A stream of requests with random arrivals and lengths is replayed in real time and by `SimInstance` with the same
formula, for both ways to form microbatches. What remains different is the simulator's model of the step loop, the
scheduler's decisions and the stages.

Each round has other requests, and percentiles are those of all rounds together: near the 99th percentile of a single
round, one millisecond more or less decides between two courses of events. The simulation is told how long the host took
to dispatch a step in the run. Writes a table. Fails if an error is above 10 %.
"""

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np

from bench.sim.delayed_stages import DelayedStages
from jaxserve.build import build
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.clock import Clock, VirtualClock
from jaxserve.core.config import EngineConfig, Microbatches
from jaxserve.core.request import Request
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.step_load import Loads, StepLoad
from jaxserve.engine.core import EngineCore
from jaxserve.engine.directory import Entry
from jaxserve.engine.loop import StepLoop
from jaxserve.planning.memory import MemoryPlan
from jaxserve.scheduler.chunk_cost import ChunkCost
from jaxserve.sim.instance import SimInstance
from jaxserve.sim.pipeline import StageTime
from jaxserve.telemetry import EngineMetrics

COST = ChunkCost(a=2e-6, b=2.5e-4, g=2.5e-2)  # of a step on the first stage, in s
SLOWER = 1.1  # the second stage, which also has the head
PROMPT, ANSWER = (100, 600), (20, 60)  # tokens: (median, maximum)
TOLERATED = 0.1
FIGURES = ("tokens/s", "P50 TTFT, ms", "P99 TTFT, ms", "P50 TPOT, ms", "P99 TPOT, ms")

Times = Mapping[str, Sequence[float]]  # of the tokens of each request (s), by its id
Round = tuple[Sequence[Request], Times]


@dataclass(frozen=True)
class StageFormula:
    """The times of two stages as a `TrueCostModel` of one plan: g + b tokens + a pairs that attention multiplies."""

    host: float = 0.0
    per_context: float | None = None

    def of(self, instance: object) -> "StageFormula":
        return self

    def seconds(self, load: StepLoad) -> float:
        return sum(stage.seconds for stage in self.stages(load))

    def stages(self, load: StepLoad) -> list[StageTime]:
        seconds = COST.a * (load.prefill + load.context) + COST.b * load.tokens + COST.g
        return [StageTime(seconds, 0.0), StageTime(SLOWER * seconds, 0.0)]


def main() -> int:
    """Replay and simulate, and return the exit status."""
    options, errors = _options(), list[float]()
    lines = [f"{options.rounds} x {options.requests} requests, {options.rate:g} each second, on two stages."]
    lines += ["", "| microbatches | figure | real | simulated | error |", "|---|---|---:|---:|---:|"]
    for mode in get_args(Microbatches):
        real, simulated = compared(mode, options.requests, options.rate, options.rounds)
        for figure in FIGURES:
            error = simulated[figure] / real[figure] - 1
            errors.append(abs(error))
            lines.append(f"| {mode} | {figure} | {real[figure]:.1f} | {simulated[figure]:.1f} | {error:+.1%} |")
    report = "\n".join(lines) + "\n"
    print(report)
    if options.out is not None:
        options.out.write_text(report, encoding="utf-8")
    return 0 if max(errors) <= TOLERATED else 1


def compared(
    mode: Microbatches, count: int, rate: float, rounds: int
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Return the figures of streams of requests on a real pipeline and in the simulator."""
    config = EngineConfig(
        model=bundled_model_path(),
        pp=2,
        microbatches=mode,
        microbatch_cost=f"{COST.a},{COST.b},{COST.g}",
        max_num_seqs=8,
        max_num_batched_tokens=136,
        memory_gb=4,
        prefix_caching=False,
    )
    built = build(config)
    try:
        (loop,) = built.instances
        delays = DelayedStages(loop.executor, StageFormula(), 2)  # type: ignore[arg-type]  # it is a BlockExecutor
        real: list[Round] = []
        for number in range(rounds + 1):
            delays.clear()
            sent = requests(count, rate, loop.clock.now(), seed=number)
            found = sent, replayed(loop, sent, _sleep_until)
            print(f"{mode} {number}: {figures([found])}, {delays}", flush=True)
            real += [found] if number else []  # the first round compiles the delays for all shapes
    finally:
        built.close()
    formula = StageFormula(host=statistics.median(delays.dispatch))
    simulation: list[Round] = []
    for number in range(1, rounds + 1):
        sent = requests(count, rate, 0.0, seed=number)
        simulation.append((sent, simulated(sim_instance(built.resolved, formula), sent)))
    return figures(real), figures(simulation)


def requests(count: int, rate: float, begin: float, *, seed: int = 0) -> list[Request]:
    """Return requests with random lengths and arrivals, `rate` each second from `begin` on. A seed has one result."""
    rng = np.random.default_rng(seed)
    arrivals = begin + np.cumsum(rng.exponential(1 / rate, count))
    prompts, answers = (
        np.clip(median * rng.lognormal(0, 0.8, count), 4, most).astype(int) for median, most in (PROMPT, ANSWER)
    )
    return [
        Request(
            str(number),
            tuple(rng.integers(5, 2000, prompt).tolist()),
            SamplingParams(temperature=0, max_tokens=int(answer), ignore_eos=True),
            float(arrival),
        )
        for number, (arrival, prompt, answer) in enumerate(zip(arrivals, prompts, answers, strict=True))
    ]


def replayed(loop: StepLoop, sent: Sequence[Request], wait_until: Callable[[Clock, float], None]) -> Times:
    """Give requests to a step loop when they are due, and return the times of their tokens."""
    pending, times = deque(sent), _no_times(sent)
    while pending or not loop.idle:
        while pending and pending[0].arrival <= loop.clock.now():
            loop.add(pending.popleft())
        if loop.idle:
            wait_until(loop.clock, pending[0].arrival)
            continue
        for output in loop.step():
            for sequence in output.outputs:
                times[output.request_id] += [loop.clock.now()] * len(sequence.token_ids)
    return times


@dataclass
class Simulated:
    """A simulated instance with its clock, and the times of the tokens of each request."""

    instance: SimInstance
    clock: VirtualClock
    times: dict[str, list[float]] = field(default_factory=dict)


def simulated(world: Simulated, sent: Sequence[Request]) -> Times:
    """Give requests to a simulated instance when they are due, and return the times of their tokens."""
    pending, instance = deque(sent), world.instance
    while pending or not instance.idle:
        if pending and pending[0].arrival <= instance.wake:
            world.clock.time = pending[0].arrival
            instance.submit(Entry(pending.popleft(), None, 0))
        else:
            world.clock.time = instance.wake
            for _ in instance.advance():
                pass
    return world.times


def sim_instance(memory: MemoryPlan, formula: StageFormula | None = None) -> Simulated:
    """Return a simulated instance with the scheduler, shapes and pages of a real engine."""
    (plan,), clock, times = memory.plan.instances, VirtualClock(), dict[str, list[float]]()
    buckets = memory.buckets_of(plan.tp)
    info = memory.info  # type: ignore[attr-defined]  # of `Resolved`
    core = EngineCore(
        memory.scheduler(plan, None)[0],
        info,
        None,
        EngineMetrics(info.name),
        plan_fields=memory.plan_fields(plan, 1),
        loads=Loads(buckets),
        stages=len(plan.stages),
    )
    instance = SimInstance(core, plan, formula or StageFormula(), buckets, clock, token_times=times)
    return Simulated(instance, clock, times)


def figures(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the figures of the requests of all rounds, which were all answered."""
    first = [times[request.id][0] - request.arrival for sent, times in rounds for request in sent]
    answers = [each for _, times in rounds for each in times.values()]
    gaps = [statistics.mean(after - before for before, after in pairwise(each)) for each in answers if len(each) > 1]
    spans = [max(each[-1] for each in times.values()) - sent[0].arrival for sent, times in rounds]
    values = [sum(map(len, answers)) / sum(spans)]
    values += [float(np.percentile(seconds, share)) * 1e3 for seconds in (first, gaps) for share in (50, 99)]
    return dict(zip(FIGURES, values, strict=True))


def _no_times(sent: Sequence[Request]) -> dict[str, list[float]]:
    return {request.id: [] for request in sent}


def _sleep_until(clock: Clock, moment: float) -> None:
    time.sleep(max(0.0, moment - clock.now()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rate", type=float, default=2.0, help="requests each second")
    parser.add_argument("--rounds", type=int, default=3, help="measured ones, after one that is not")
    parser.add_argument("--out", type=Path, help="file for the table")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
