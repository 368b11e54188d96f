"""The search for the cheapest plan on each hardware: how many instances of which candidate.

More instances serve a load no worse, so the smallest number that meets the objectives is found by bisection. Candidates
are tried in the order of the least that they can cost, static ones first. One that cannot be cheaper than the best
so far is not simulated. Any other is simulated with the most instances that are cheaper, and bisected only if these
meet the objectives.

Each hardware is searched in a process of its own, by its own results alone. Equal options therefore give equal plans,
unless the time runs out.
"""

import logging
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context

from jaxserve.control.policies import precisions_of
from jaxserve.core.clock import Clock, SystemClock
from jaxserve.core.progress import Progress, ignore_progress
from jaxserve.planning.spec import STATIC
from jaxserve.sim.capacity.bounds import Bounds
from jaxserve.sim.capacity.candidates import Candidate, Candidates, Fitting, Rejection
from jaxserve.sim.capacity.evaluate import Evaluation, evaluate
from jaxserve.sim.capacity.load import PlannedLoad
from jaxserve.sim.capacity.objectives import end_of_run
from jaxserve.sim.run import cluster_of
from jaxserve.sim.workload import SimWorkload

MAX_SPEED = 4.0  # times the rate up to which the margin is looked for
NOT_SIMULATED = "not simulated"  # how the reason of a candidate that cannot be cheaper begins
SPEED_STEP = 0.05  # of the rate: the resolution of the margin


@dataclass(frozen=True)
class Search:
    """The goal and the means of a search."""

    candidates: Candidates
    load: PlannedLoad
    max_devices: int
    until: float  # s of a monotonic clock at which the search ends


@dataclass(frozen=True)
class Plan:
    """The smallest number of instances of a candidate that meets the objectives."""

    candidate: Candidate
    instances: int
    cost: float
    evaluation: Evaluation
    speed: float = 1.0  # times the rate up to which the objectives are met
    limit: str = ""  # what the cluster runs into beyond that
    fewer: str = ""  # what happens with one instance less

    @property
    def devices(self) -> int:
        """The devices of all instances."""
        return self.instances * self.candidate.devices


@dataclass
class Found:
    """The result of the search on one hardware: its plans, the cheapest first, and what was rejected."""

    plans: list[Plan] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    simulations: int = 0


def search_all(search: Search, costs: Mapping[str, float], jobs: int, progress: Progress) -> Iterator[Found]:
    """Yield what is found on each hardware of `costs` (of one device), in any order.

    `progress` is called with the hardware that is done, or with one hardware's candidates that are done if no process
    is started.
    """
    done = 0
    if jobs == 1 or len(costs) == 1:
        for hardware, cost in costs.items():
            yield search_hardware(search, hardware, cost, progress=progress)
        return
    with get_context("spawn").Pool(min(jobs, len(costs)), initializer=_begin_process) as pool:
        for hardware, found in pool.imap_unordered(partial(_named_search, search), costs.items()):
            yield found
            progress(hardware, done := done + 1, len(costs))


def _begin_process() -> None:
    """Leave Ctrl-C and remarks on single clusters to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("jaxserve").setLevel(logging.ERROR)


def _named_search(search: Search, item: tuple[str, float]) -> tuple[str, Found]:
    return item[0], search_hardware(search, *item)


def search_hardware(
    search: Search, hardware: str, cost: float, *, clock: Clock | None = None, progress: Progress = ignore_progress
) -> Found:
    """Return the plans on one hardware, whose devices cost `cost` each. Raise `ConfigError` for an invalid option."""
    return _HardwareSearch(search, cost, clock or SystemClock(), progress).run(hardware)


class _HardwareSearch:
    def __init__(self, search: Search, cost: float, clock: Clock, progress: Progress):
        self._search, self._cost, self._clock, self._progress = search, cost, clock, progress
        self._workload = search.load.workload()
        trace = self._workload.trace
        objectives = search.candidates.objectives
        outputs = int(trace.output_tokens.max(initial=1))
        self._seconds = end_of_run(objectives, trace.duration_s, outputs)
        self._share = min(each.percentile for each in objectives) / 100
        self._found = Found()
        self._known: dict[tuple[Candidate, int], Evaluation] = {}

    def run(self, hardware: str) -> Found:
        bounded: list[tuple[tuple[bool, int, int], Fitting, int]] = []
        for number, each in enumerate(self._search.candidates.on(hardware, self._search.max_devices)):
            if isinstance(each, Rejection):
                self._found.rejections.append(each)
                continue
            least = self._least(each)
            if least is not None:
                order = each.candidate.policy != STATIC, least * each.candidate.devices, number
                bounded.append((order, each, least))
        for number, (_, fitting, least) in enumerate(sorted(bounded, key=lambda item: item[0])):
            self._progress(f"candidates on {hardware}", number, len(bounded))
            self._try(fitting, least)
        self._found.plans.sort(key=lambda plan: plan.cost)
        self._found.plans = [self._with_margin(plan) for plan in self._found.plans]
        return self._found

    def _least(self, fitting: Fitting) -> int | None:
        """Return the bound on the number of instances; None if the candidate was rejected by a bound.

        An instance whose policy changes layers is at best as fast as with all layers in one of its precisions.
        """
        candidate, common = fitting.candidate, self._search.candidates
        clusters = [fitting.cluster]
        for precision in precisions_of(candidate.policy) or ():
            other = common.fitting(replace(candidate, precision=precision, policy=STATIC))
            clusters += [other.cluster] if isinstance(other, Fitting) else []
        bounds = [Bounds.of(cluster, self._workload) for cluster in clusters]
        reasons = [each.reason(common.objectives) for each in bounds]
        if all(reasons):
            self._reject(candidate, str(reasons[0]))
            return None
        return min(each.instances(self._seconds, self._share) for each in bounds)

    def _try(self, fitting: Fitting, least: int) -> None:
        candidate = fitting.candidate
        best = min(self._found.plans, key=lambda plan: plan.devices, default=None)
        most = self._search.max_devices // candidate.devices
        if best is not None:
            most = (best.devices - 1) // candidate.devices
        if least > most:
            self._reject(candidate, self._too_many(candidate, least, best))
            return
        if self._clock.now() > self._search.until:
            self._reject(candidate, "not tried: the time of the search was over (--budget)")
            return
        if not self._meets(candidate, most):
            self._reject_simulated(candidate, most)
            return
        instances = self._smallest(candidate, least, most)
        fewer = self._evaluate(candidate, instances - 1).failure if instances > 1 else ""
        evaluation, cost = self._evaluate(candidate, instances), instances * candidate.devices * self._cost
        self._found.plans.append(Plan(candidate, instances, cost, evaluation, fewer=fewer))

    def _smallest(self, candidate: Candidate, least: int, most: int) -> int:
        """Return the smallest number of instances that meets the objectives, which `most` do."""
        low, high, step = least - 1, least, 1
        while not self._meets(candidate, high):
            low, high, step = high, min(high + step, most), 2 * step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._meets(candidate, middle) else (middle, high)
        while high > 1 and self._meets(candidate, high - 1):  # the bound is an estimate
            high -= 1
        return high

    def _with_margin(self, plan: Plan) -> Plan:
        """Return the plan with the rate up to which it meets the objectives, by bisection."""
        low, high = 1.0, 2.0
        beyond = plan.evaluation
        while high <= MAX_SPEED:
            evaluation = self._simulate(plan.candidate, plan.instances, self._search.load.workload(high))
            if not evaluation.meets:
                beyond = evaluation
                break
            low, high = high, 2 * high
        else:
            return replace(plan, speed=low, limit=beyond.limit)
        while high - low > SPEED_STEP + 1e-9 and self._clock.now() < self._search.until:
            middle = low + SPEED_STEP * max(round((high - low) / 2 / SPEED_STEP), 1)
            evaluation = self._simulate(plan.candidate, plan.instances, self._search.load.workload(middle))
            if evaluation.meets:
                low = middle
            else:
                high, beyond = middle, evaluation
        return replace(plan, speed=low, limit=beyond.limit)

    # -- simulations

    def _meets(self, candidate: Candidate, instances: int) -> bool:
        return self._evaluate(candidate, instances).meets

    def _evaluate(self, candidate: Candidate, instances: int) -> Evaluation:
        key = candidate, instances
        if key not in self._known:
            self._known[key] = self._simulate(candidate, instances, self._workload)
        return self._known[key]

    def _simulate(self, candidate: Candidate, instances: int, workload: SimWorkload) -> Evaluation:
        common = self._search.candidates
        options = candidate.options(common.base, common.objectives, instances, common.floor)
        cluster = cluster_of(options, prefix_caching=common.prefix_caching)
        self._found.simulations += 1
        return evaluate(cluster, workload, common.objectives, options.model_folder)

    # -- rejections

    def _reject(self, candidate: Candidate, reason: str) -> None:
        self._found.rejections.append(Rejection(str(candidate), reason))

    def _reject_simulated(self, candidate: Candidate, instances: int) -> None:
        seen = self._evaluate(candidate, instances)
        missed = f", {seen.missed:,} of {seen.requests:,} requests missed" if seen.missed else ""
        why = f"; {seen.idle_policy}" if seen.idle_policy else ""
        count = instances * candidate.devices
        devices = f"{count} device{'s' if count > 1 else ''}"
        self._reject(candidate, f"{seen.failure} with {devices}{missed}; limited by {seen.limit}{why}")

    def _too_many(self, candidate: Candidate, least: int, best: Plan | None) -> str:
        if best is None:
            most = self._search.max_devices
            return f"takes at least {least * candidate.devices} devices, more than --max-devices {most}"
        return f"{NOT_SIMULATED}: cannot take fewer than {best.devices} devices, which are enough with {best.candidate}"


def merged(found: Sequence[Found]) -> Found:
    """Return the results on all hardware as one, the cheapest plan first."""
    plans = [plan for each in found for plan in each.plans]
    plans.sort(key=lambda plan: (plan.cost, plan.devices, str(plan.candidate)))
    rejections = [rejection for each in found for rejection in each.rejections]
    return Found(plans, rejections, sum(each.simulations for each in found))
