"""Small simulated clusters, in which the time of a step follows from a formula."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.control import block_chain, parallel_plan
from jaxserve.control.costs import InstanceCost
from jaxserve.control.plan import InstancePlan
from jaxserve.core.clock import VirtualClock
from jaxserve.core.step_load import Loads, StepLoad
from jaxserve.core.step_shapes import Buckets
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.core import EngineCore
from jaxserve.kvcache import PagePool, PageTable
from jaxserve.scheduler import Scheduler, SchedulerLimits
from jaxserve.sim.front import SimFront
from jaxserve.sim.instance import SimInstance
from jaxserve.sim.simulation import Answered, Control, Frontend, SimRequest, Simulation
from jaxserve.telemetry import EngineMetrics, Snapshot

PAGE, TILE, LONGEST = 4, 8, 64  # tokens of a page, a tile and the longest sequence


@dataclass(frozen=True)
class Formula:
    """A `TrueCostModel`: 1 s a step, 0.1 s a token, and a little for the context. `alike` allows steady runs."""

    alike: bool = True
    host: float = 0.25

    def of(self, instance: InstancePlan) -> "Formula":
        return self

    @property
    def per_context(self) -> float | None:
        return 0.003 if self.alike else None

    def seconds(self, load: StepLoad) -> float:
        return 1 + 0.1 * load.tokens + 0.003 * load.context + 0.001 * load.prefill


def cluster(
    instances: int = 1,
    *,
    pages: int = 40,
    seqs: int = 4,
    caching: bool = False,
    max_queued: int = 1000,
    alike: bool = True,
    detailed: bool = True,
    frontend: Frontend | None = None,
    control: Control | None = None,
    cost: InstanceCost | None = None,
) -> Simulation:
    """Return a simulation of instances with `pages` KV pages and at most `seqs` sequences each.

    `cost` are the expected times of steps; `Formula` has the true ones.
    """
    chain = block_chain("bfloat16", ["bfloat16"] * 2, "bfloat16")
    plan = parallel_plan(chain, kv_pages=pages, tp=1, pp=1, dp=instances, devices=instances)
    clock = VirtualClock()
    info = ModelInfo("small", LONGEST, 2**31 - 1, 8, 0, max_queued_requests=max_queued)
    buckets = Buckets(seqs, 4, TILE, 1, (LONGEST // PAGE,))
    made, token_times = [], {} if detailed else None
    for number, instance in enumerate(plan.instances):
        pool = PagePool(pages, caching=caching, min_pages=LONGEST // PAGE + 1, max_pages=pages)
        scheduler = Scheduler(SchedulerLimits(seqs, 4, TILE, PAGE), pool, PageTable(seqs, LONGEST // PAGE))
        core = EngineCore(
            scheduler,
            info,
            None,
            EngineMetrics("small"),
            plan_fields=Snapshot(kv_pages_total=pages - 1),
            index=number,
            loads=Loads(buckets),
            cost=cost,
        )
        made.append(SimInstance(core, instance, Formula(alike), buckets, clock, token_times=token_times))
    return Simulation(SimFront(made, info, clock), clock, frontend=frontend, control=control, token_times=token_times)


def answered(simulation: Simulation, requests: Sequence[SimRequest]) -> list[Answered]:
    """Run a simulation and return the results of all requests, in order of arrival."""
    return sorted(simulation.run(requests), key=lambda answer: answer.index)
