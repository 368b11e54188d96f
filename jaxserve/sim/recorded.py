"""Replays a recorded run: with the times of a step log, the simulator must take the same steps and decisions.

Simulated are the engine core with its scheduler and pages, and the controller with its policy. The log gives the
arrivals of requests, the durations of steps, the times of the controller's ticks and the outcomes of transitions.

Threads are not simulated. Where their order depends on microseconds, the log gives it: the step before which a request
arrived or a plan came into force, and the snapshot that the controller saw. Any remaining difference from the log is a
difference between simulator and engine, and raises `Diverged`.
"""

import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from jaxserve.control.controller import Controller
from jaxserve.control.costs import CostModel
from jaxserve.control.plan import InstancePlan, Plan, PlanInForce
from jaxserve.control.plan_yaml import from_yaml
from jaxserve.control.policies import QualityLoss, load_policy
from jaxserve.control.policy import Policy
from jaxserve.control.reconfigure import PlanFacts, commit
from jaxserve.control.transitions import Outcome, Transition
from jaxserve.core.clock import Clock, VirtualClock
from jaxserve.core.errors import ConfigError, JaxserveError
from jaxserve.core.numeric import ceil_div
from jaxserve.core.precision import assignment_id
from jaxserve.core.request import Request
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.step_load import Loads, StepLoad
from jaxserve.core.step_shapes import Buckets
from jaxserve.core.work import Work
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.core import EngineCore
from jaxserve.engine.logged_controller import decision_record
from jaxserve.engine.step_log import Arrival, DecisionRecord, Recording, Step, Tick, resources_of
from jaxserve.kvcache import PagePool, PageTable
from jaxserve.scheduler import Scheduler, SchedulerLimits
from jaxserve.sim.instance import SimInstance
from jaxserve.telemetry import EngineMetrics, Snapshot

UNLIMITED = 2**31 - 1  # the size of the queue, because the log has only accepted requests
SAME_TIME = 1e-9  # s; times that were subtracted and added again may differ in the last bits
MAX_SNAPSHOTS = 1000  # stored for the controller's next tick


class Diverged(JaxserveError):
    """The simulation differs from the recording. The message says where, and both values."""


class RecordedCostModel:
    """A `TrueCostModel` of one instance whose steps end at the recorded times, in the order of the log."""

    host = 0.0
    per_context = None  # so that `seconds` is called for every step

    def __init__(self, steps: Sequence[Step], clock: Clock):
        self._steps, self._clock = steps, clock
        self._done, self._end = 0, -inf

    def of(self, instance: InstancePlan) -> "RecordedCostModel":
        """Return this cost model for any plan: the log has the times under the plan that was in force."""
        return self

    def seconds(self, load: StepLoad) -> float:
        """Return the seconds from the end of the previous step, or from now if it has ended, to the recorded end.

        Proceeds to the next recorded step. Raise `Diverged` if the load is not the recorded one, or if no step remains.
        """
        if self._done == len(self._steps):
            raise Diverged(f"step {self._done} is not in the recording, whose last step is {self._done - 1}")
        step = self._steps[self._done]
        if step.load != load:
            raise Diverged(f"step {step.number}: {load}, recorded {step.load}")
        start, self._end = max(self._end, self._clock.now()), step.ended
        self._done += 1
        return step.ended - start


@dataclass(frozen=True)
class Replayed:
    """The result of a replay, all of it as recorded."""

    decisions: tuple[DecisionRecord, ...]
    steps: int
    plan: Plan  # at the end


def replay(recording: Recording, policy: Policy | None = None) -> Replayed:
    """Simulate a recorded run, by default under the recorded policy.

    Raise `Diverged` if a step or a decision differs. Raise `ConfigError` for a run that cannot be repeated. It must
    have one instance with overlapping steps. Each request must have one answer (n = 1) that ended by its length, and a
    prompt that shared nothing in the prefix cache.
    """
    _check(recording)
    return _Replay(recording, policy).run()


class _ReplayCore(EngineCore):
    """An engine core that receives the recorded plans and requests before each step begins."""

    def __init__(self, replay: "_Replay", *args: Any, **kwargs: Any):
        self._replay, self.snapshots = replay, deque[Snapshot](maxlen=MAX_SNAPSHOTS)
        super().__init__(*args, **kwargs)
        self.snapshots.append(self.snapshot)

    @property
    def begun(self) -> int:
        """The number of steps that have begun."""
        return self._counters.steps

    def schedule(self, now: float) -> Work:
        step = self._replay.next_step()
        if step is None or not self._replay.may_begin(step, now):
            return Work(self._counters.steps)
        self._replay.apply_inputs_of(step)
        # The recorded time and not `now`: preempted sequences wait from then on.
        work = super().schedule(step.begun)
        if not work:
            raise Diverged(f"step {step.number} has nothing to do, recorded {step.load}")
        return work

    def snapshot_at(self, time: float, version: int) -> Snapshot:
        """Return the snapshot of a time (s) and plan version. Raise `Diverged` if there was none."""
        for snapshot in reversed(self.snapshots):
            if snapshot.plan_version == version and abs(snapshot.time - time) < SAME_TIME:
                return snapshot
        raise Diverged(f"no snapshot was taken at {time:.6f} s with plan {version}, which the controller saw")

    def _take_snapshot(self, now: float) -> None:
        super()._take_snapshot(now)
        self.snapshots.append(self.snapshot)


class _ReplayInstance:
    """The recorded instance as its transitions see it (`control.transitions.RunningInstance`), without a device."""

    def __init__(self, core: EngineCore):
        self.core = core

    def use(self, plan: InstancePlan) -> None:
        pass

    def replace_layers(self, layers: Sequence[Any]) -> Sequence[Any]:
        return layers

    def exchange_layer(self, block: str, precision: str, seconds: float) -> None:
        pass

    def extend_pools(self, segments: Any) -> None:
        pass

    def shrink_pools(self, moves: Mapping[int, int], pages: int) -> None:
        pass


class _ReplayActuator:
    """A `control.Actuator` that commits transitions when their plan came into force in the log."""

    def __init__(self, plan: Plan, core: EngineCore, costs: CostModel | None):
        self.in_force, self._facts = PlanInForce(plan), PlanFacts(_plan_fields, costs)
        self._instance = _ReplayInstance(core)
        self.tick = Tick(0.0, False, (), ())  # the recorded tick in progress
        self._uncommitted: deque[Transition] = deque()
        self._without_outcome: deque[Transition] = deque()

    @property
    def busy(self) -> bool:
        return self.tick.busy

    def start(self, transitions: Sequence[Transition]) -> None:
        self._uncommitted.extend(transitions)
        self._without_outcome.extend(transitions)

    def poll(self) -> Sequence[Outcome]:
        outcomes = [Outcome(self._without_outcome.popleft(), error, seconds) for error, seconds in self.tick.outcomes]
        if any(outcome.error is not None for outcome in outcomes):
            self._uncommitted.clear()
            self._without_outcome.clear()
        return outcomes

    def commit(self, version: int) -> None:
        """Put the plan of a version in force. Raise `Diverged` if the decided transitions do not lead to it."""
        while (present := self.in_force.version) < version:
            if not self._uncommitted:
                raise Diverged(f"plan {version} was in force, but the decisions lead to plan {present} only")
            transition = self._uncommitted.popleft()
            commit(transition.instance, self._instance, self.in_force, self._facts, (transition,), ())


class _Replay:
    """The events of a recording, in the order of their times."""

    def __init__(self, recording: Recording, policy: Policy | None):
        facts, plan = recording.facts, from_yaml(json.dumps(recording.facts["plan"]))
        resources = replace(
            resources_of(facts["resources"], plan),
            costs=recording.costs,
            shapes=_buckets(facts),
            page_size=facts["page_size"],
        )
        if policy is None:
            losses = facts.get("layer_losses")
            policy = load_policy(
                facts["policy"],
                resources,
                facts["swap_order"],
                slo_ttft=facts["slo_ttft"],
                slo_tpot=facts.get("slo_tpot"),
                max_quality_loss=facts.get("max_quality_loss"),
                loss=None if losses is None else QualityLoss(losses),
            )
        self._recording, self._clock = recording, VirtualClock()
        self._arrivals: dict[int, list[Arrival]] = {}  # by the step before which they came
        for arrival in recording.arrivals:
            self._arrivals.setdefault(arrival.step, []).append(arrival)
        self._num_added = 0
        self._ticks = deque(recording.ticks)
        self._decisions: list[DecisionRecord] = []
        self._core = self._new_core(plan)
        cost_model = RecordedCostModel(recording.steps, self._clock)
        self._instance = SimInstance(self._core, plan.instances[0], cost_model, _buckets(facts), self._clock)
        self._actuator = _ReplayActuator(plan, self._core, recording.costs)
        (self._name,) = (instance.name for instance in plan.instances)
        self._controller = Controller(self._actuator.in_force, policy, resources, {self._name: self._actuator})

    def run(self) -> Replayed:
        """Replay the whole recording."""
        while (due := self._due()) < inf:
            self._tick_until(due - SAME_TIME)
            self._clock.time = due
            if self._instance.wake == inf:
                self._instance.call(lambda: None)
            for _ in self._instance.advance():
                pass
        self._tick_until(inf)
        if len(self._decisions) < len(self._recording.decisions):
            raise Diverged(f"recorded but not decided: {self._recording.decisions[len(self._decisions)]}")
        return Replayed(tuple(self._decisions), self._core.begun, self._actuator.in_force.plan)

    # -- called by the core

    def next_step(self) -> Step | None:
        """Return the recorded step that begins next; None after the last step."""
        index = self._core.begun
        return self._recording.steps[index] if index < len(self._recording.steps) else None

    def may_begin(self, step: Step, now: float) -> bool:
        """Return whether the recorded step had begun by `now`.

        A step that began while the previous one ran, so that it was queued, may begin whenever the core asks.
        """
        queued = step.number > 0 and step.begun < self._recording.steps[step.number - 1].ended
        return queued or now >= step.begun

    def apply_inputs_of(self, step: Step) -> None:
        """Apply the decisions, the plan and the requests that preceded the recorded begin of a step."""
        self._tick_until(step.begun)
        self._actuator.commit(step.version)
        for arrival in self._arrivals.pop(step.number, ()):
            self._num_added += 1
            params = SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True, seed=0)
            # Different tokens for each request, so that the prefix cache finds nothing.
            prompt = (self._num_added,) * arrival.prompt_tokens
            self._core.add(Request(arrival.id, prompt, params, arrival.time, priority=arrival.priority, stream=False))

    # -- events

    def _due(self) -> float:
        """Return when the instance has its next event (s): a step ends, or begins on an idle device."""
        step = self.next_step() if self._instance.wake == inf else None
        return self._instance.wake if step is None else step.begun

    def _tick_until(self, end: float) -> None:
        """Run all ticks of the controller up to `end` (s)."""
        while self._ticks and _time_of(self._ticks[0]) <= end:
            self._tick(self._ticks.popleft())

    def _tick(self, tick: Tick) -> None:
        self._actuator.tick = tick
        ((time, version),) = tick.seen
        # A plan may come into force while no step runs.
        if self._core.plan_fields.plan_version < version:
            self._actuator.commit(version)
        self._controller.tick(tick.time, {self._name: self._core.snapshot_at(time, version)})
        if (decided := decision_record(self._controller, tick.time)) is not None:
            expected = self._recording.decisions[len(self._decisions) :][:1]
            if (decided,) != expected:
                raise Diverged(f"at {tick.time:.6f} s {decided} was decided, recorded {expected or 'nothing'}")
            self._decisions.append(decided)

    def _new_core(self, plan: Plan) -> _ReplayCore:
        facts, (instance,) = self._recording.facts, plan.instances
        buckets, max_model_len, page_size = _buckets(facts), facts["max_model_len"], facts["page_size"]
        width = ceil_div(max_model_len, page_size)
        least, most = facts["resources"]["min_pages"], facts["reserved_kv_pages"]
        pages = PagePool(instance.kv_pages, caching=facts["prefix_caching"], min_pages=least, max_pages=most)
        limits = SchedulerLimits(buckets.max_num_seqs, buckets.max_tiles, buckets.tile, page_size)
        scheduler = Scheduler(limits, pages, PageTable(buckets.max_num_seqs, max(width, *buckets.widths)))
        info = ModelInfo(
            facts["model"],
            max_model_len,
            vocab_size=UNLIMITED,
            hidden_size=1,
            created=0,
            max_queued_requests=UNLIMITED,
            max_queued_tokens=UNLIMITED,
        )
        costs = self._recording.costs
        return _ReplayCore(
            self,
            scheduler,
            info,
            None,
            EngineMetrics(info.name),
            salt=assignment_id(instance.layer_precisions),
            plan_fields=_plan_fields(instance, plan.version),
            loads=Loads(buckets),
            cost=None if costs is None else costs.of(instance),
        )


def _check(recording: Recording) -> None:
    """Raise `ConfigError` for a run that cannot be replayed."""
    if (instances := len(recording.facts["plan"]["instances"])) > 1:
        raise ConfigError(f"the recorded run has {instances} instances (dp): a replay needs exactly one")
    if (stages := len(recording.facts["plan"]["instances"][0]["stages"])) > 1:
        raise ConfigError(f"the recorded instance has {stages} stages (pp): a replay needs exactly one")
    if recording.regroups:
        raise ConfigError(f"the recorded run has {len(recording.regroups)} regroups of instances: a replay needs none")
    if not recording.facts["overlap"]:
        raise ConfigError("the recorded run has no overlapping steps (overlap): a replay needs them")
    for arrival in recording.arrivals:
        if arrival.answers != 1:
            raise ConfigError(f"request {arrival.id} has {arrival.answers} answers (n): a replay needs exactly one")
    for answer in recording.answers.values():
        if answer.reason != "length":
            raise ConfigError(
                f"request {answer.id} ended by {answer.reason!r}: in a replay all must end by their length (ignore_eos)"
            )
        if answer.cached_tokens:
            raise ConfigError(
                f"request {answer.id} has {answer.cached_tokens} tokens from the prefix cache: a replay needs prompts "
                "that share nothing"
            )


def _time_of(tick: Tick) -> float:
    """Return when the controller had its snapshot (s), which may be after the time of the tick."""
    ((seen, _),) = tick.seen
    return max(tick.time, float(seen))


def _plan_fields(instance: InstancePlan, version: int) -> Snapshot:
    """Return the fields of a snapshot that follow from a plan, without bytes, which no policy reads."""
    layers = dict(Counter(instance.layer_precisions))
    return Snapshot(kv_pages_total=instance.kv_pages - 1, plan_version=version, layers_by_precision=layers)


def _buckets(facts: Mapping[str, Any]) -> Buckets:
    buckets = facts["buckets"]
    return Buckets(**{**buckets, "widths": tuple(buckets["widths"])})
