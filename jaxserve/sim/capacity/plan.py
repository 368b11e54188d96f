"""The answer of `jaxserve sim plan`, from its options."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.bench.metrics import PERCENTILES
from jaxserve.bench.options import ArrivalOptions, TraceOptions
from jaxserve.calibration.sensitivity.order import sensitivity
from jaxserve.control.policies import precisions_of
from jaxserve.control.policies.quality import FLOOR
from jaxserve.core.clock import SystemClock
from jaxserve.core.machine import processors
from jaxserve.core.precision import BITS
from jaxserve.core.progress import Progress
from jaxserve.sim.capacity.candidates import Candidates, Rejection, chosen_precisions
from jaxserve.sim.capacity.load import PlannedLoad, arguments_of
from jaxserve.sim.capacity.objectives import Objective, parse_objectives, strictest
from jaxserve.sim.capacity.options import Cost, PlanOptions
from jaxserve.sim.capacity.search import NOT_SIMULATED, Found, Plan, Search, merged, search_all
from jaxserve.sim.hardware import Hardware, load_hardware
from jaxserve.sim.options import ClusterOptions, FigureOptions
from jaxserve.sim.shape import ModelShape
from jaxserve.sim.workload import SimWorkload

TOGETHER = 2  # rejected candidates of one reason that are named


@dataclass(frozen=True)
class Answer:
    """The plans that were found, and what they were chosen among."""

    options: PlanOptions
    candidates: Candidates
    load: PlannedLoad
    workload: SimWorkload
    shape: ModelShape
    hardware: Mapping[str, Hardware]
    cost: Cost
    found: Found

    @property
    def plans(self) -> list[Plan]:
        """The plans to show, the cheapest first."""
        return self.found.plans[: self.options.top]

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """The objectives that the plans meet."""
        return self.candidates.objectives

    def cluster_options(self, plan: Plan) -> ClusterOptions:
        """Return the options of `jaxserve sim` for a plan."""
        common = self.candidates
        return plan.candidate.options(common.base, common.objectives, plan.instances, common.floor)

    def command(self, plan: Plan) -> list[str]:
        """Return the command that simulates a plan under the load again."""
        limits = [f"{name}:{limit:g}" for name, limit in strictest(self.objectives).items()]
        figures = FigureOptions(goodput=[" ".join(limits)])
        if others := {each.percentile for each in self.objectives} - set(PERCENTILES):
            percentiles = sorted({*PERCENTILES, *others})
            figures = replace(figures, metric_percentiles=",".join(f"{each:g}" for each in percentiles))
        groups = (self.cluster_options(plan), self.load.dataset, self.load.arrivals, self.load.trace, figures)
        return ["jaxserve", "sim", *(word for group in groups for word in arguments_of(group))]


def make_answer(
    options: PlanOptions,
    base: ClusterOptions,
    dataset: Mapping[str, Any],
    arrivals: ArrivalOptions,
    trace: TraceOptions,
    progress: Progress,
) -> Answer:
    """Search for the cheapest plans. `base` has what all clusters have in common, `dataset` the options given.

    Raise `ConfigError` if options are invalid or do not fit together.
    """
    objectives = parse_objectives(options.goodput or (), options.percentile)
    names, prices = options.hardware_names(), options.prices()
    hardware = {name: load_hardware(name) for name in names}
    load = PlannedLoad.of(dataset, arrivals, trace)
    workload = load.workload()
    shape = ModelShape.load(base.model_path)
    floor = FLOOR if base.max_quality_loss is None else base.max_quality_loss
    known = sensitivity(base.model_folder, shape.num_layers, (), None)
    loss = {name: known.loss([name] * shape.num_layers) for name in BITS}
    precisions, rejected = chosen_precisions(options.precision_names(), shape.dtype, loss, floor)
    policies = options.policy_names()
    for policy in policies:
        precisions_of(policy)  # raises if it is unknown
    caching = workload.shares if base.prefix_caching is None else base.prefix_caching
    candidates = Candidates(base, objectives, precisions, policies, floor, caching)
    cost = Cost(prices or {name: each.bandwidth for name, each in hardware.items()}, bool(prices))
    search = Search(candidates, load, options.max_devices, SystemClock().now() + options.budget)
    jobs = options.jobs or processors()
    found = merged(list(search_all(search, {name: cost.by_hardware[name] for name in names}, jobs, progress)))
    found.rejections[:0] = rejected
    return Answer(options, candidates, load, workload, shape, hardware, cost, found)


def rejections(answer: Answer) -> list[Rejection]:
    """Return why other candidates are not in the answer, those of equal reasons together.

    Those on the hardware of the cheapest plan come first, then those on hardware without a plan. Those that were not
    simulated because they cannot be cheaper come last.
    """
    plans = answer.found.plans
    best = plans[0].candidate.hardware_name if plans else None
    served = {plan.candidate.hardware_name for plan in plans}

    def order(each: Rejection) -> tuple[bool, bool, bool]:
        hardware = each.what.partition(",")[0]
        return each.reason.startswith(NOT_SIMULATED), hardware != best, hardware in served

    by_reason: dict[str, list[str]] = {}
    for each in sorted(answer.found.rejections, key=order):
        by_reason.setdefault(each.reason, []).append(each.what)
    return [Rejection(_together(what), reason) for reason, what in by_reason.items()]


def _together(names: list[str]) -> str:
    return " and ".join(names) if len(names) <= TOGETHER else f"{names[0]} and {len(names) - 1} other candidates"
