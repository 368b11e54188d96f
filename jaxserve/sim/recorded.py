"""A recorded run played back: with the times of a step log the simulator takes the same steps and the same decisions.

What is simulated is the engine core, with its scheduler and pages, the controller and its policy. What the log gives is
when requests came, how long steps took, when the controller looked, and how transitions ended. The log also says who
came first where microseconds decide, because threads are not simulated: before which step a request or a plan was
there, and which snapshot the controller saw. Whatever then differs from the log is a difference between the simulator
and the engine, and `Diverged`.
"""

import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from jaxserve.control.controller import Controller
from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.plan_yaml import from_yaml
from jaxserve.control.policies import load_policy
from jaxserve.control.policy import Policy
from jaxserve.control.resources import Resources
from jaxserve.control.transitions import Outcome, ResizeKVPool, Transition
from jaxserve.core.clock import Clock, VirtualClock
from jaxserve.core.errors import ConfigError, JaxserveError
from jaxserve.core.numeric import ceil_div
from jaxserve.core.precision import assignment_id
from jaxserve.core.request import Request
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.step_load import StepLoad
from jaxserve.core.step_shapes import Buckets
from jaxserve.core.work import Work
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.core import EngineCore
from jaxserve.engine.step_log import Arrival, Decided, Recording, Step, Tick, decided_at
from jaxserve.kvcache import PagePool, PageTable
from jaxserve.scheduler import Scheduler, SchedulerLimits
from jaxserve.sim.instance import SimInstance
from jaxserve.telemetry import EngineMetrics, Snapshot

WITHOUT_LIMIT = 2**31 - 1  # of the queue: the log has what was accepted
SAME_TIME = 1e-9  # s; a time that was subtracted and added again is not the same to the last bit
KEPT = 1000  # snapshots between two looks of the controller


class Diverged(JaxserveError):
    """The simulation differs from the recording; the message says where, what was got and what was recorded."""


class RecordedTiming:
    """The `Timing` of one instance whose steps end when they did, in the order of the log."""

    host = 0.0
    per_context = None  # every step is asked for

    def __init__(self, steps: Sequence[Step], clock: Clock):
        self._steps, self._clock = steps, clock
        self._done, self._end = 0, -inf

    def of(self, instance: InstancePlan) -> "RecordedTiming":
        """The times of any plan: the log knows which was in force."""
        return self

    def seconds(self, load: StepLoad) -> float:
        """From the end of the step before, or from now if that has ended. Raises `Diverged`. Mutates."""
        if self._done == len(self._steps):
            raise Diverged(f"step {self._done} is not in the recording, whose last one is {self._done - 1}")
        step = self._steps[self._done]
        if step.load != load:
            raise Diverged(f"step {step.number}: {load}, recorded {step.load}")
        start, self._end = max(self._end, self._clock.now()), step.ended
        self._done += 1
        return step.ended - start


@dataclass(frozen=True)
class Replayed:
    """What the simulation decided, all of it as recorded."""

    decisions: tuple[Decided, ...]
    steps: int
    plan: Plan  # at the end


def replay(recording: Recording, policy: Policy | None = None) -> Replayed:
    """Simulates a recorded run; `policy` is by default the recorded one.

    Raises `Diverged` where a step or a decision differs, and `ConfigError` for a run that cannot be repeated: all
    answers must have ended by their length, alone (n = 1), with prompts that share nothing, on overlapping steps of one
    instance.
    """
    _check(recording)
    return _Replay(recording, policy).run()


class _Core(EngineCore):
    """A core that is asked for steps by the simulator, and takes in first what the real one had by then."""

    def __init__(self, replay: "_Replay", *args: Any, **kwargs: Any):
        self._replay, self.snapshots = replay, deque[Snapshot](maxlen=KEPT)
        super().__init__(*args, **kwargs)
        self.snapshots.append(self.snapshot)

    @property
    def begun(self) -> int:
        """How many steps have."""
        return self._record.steps

    def begin(self, now: float) -> Work:
        step = self._replay.coming()
        if step is None or not self._replay.may_begin(step, now):
            return Work(self._record.steps)
        self._replay.take_in(step)
        work = super().begin(step.begun)  # not now: what is preempted waits since then
        if not work:
            raise Diverged(f"step {step.number} has nothing to do, recorded {step.load}")
        return work

    def seen(self, time: float, version: int) -> Snapshot:
        """The snapshot that the controller saw. Raises `Diverged`."""
        for snapshot in reversed(self.snapshots):
            if snapshot.plan_version == version and abs(snapshot.time - time) < SAME_TIME:
                return snapshot
        raise Diverged(f"there is no snapshot of {time:.6f} s with plan {version}")

    def _take_snapshot(self, now: float) -> None:
        super()._take_snapshot(now)
        self.snapshots.append(self.snapshot)


class _Actuator:
    """The `control.Actuator` of a recording. Its transitions are committed when the log has their plan in force."""

    def __init__(self, plan: Plan, core: EngineCore):
        self.plan, self._core = plan, core
        self.tick = Tick(0.0, False, (), ())  # the one in progress
        self._uncommitted: deque[Transition] = deque()
        self._open: deque[Transition] = deque()  # whose outcome is to come

    @property
    def busy(self) -> bool:
        return self.tick.busy

    def start(self, transitions: Sequence[Transition]) -> None:
        self._uncommitted.extend(transitions)
        self._open.extend(transitions)

    def poll(self) -> Sequence[Outcome]:
        outcomes = [Outcome(self._open.popleft(), error, seconds) for error, seconds in self.tick.outcomes]
        if any(outcome.error is not None for outcome in outcomes):
            self._uncommitted.clear()
            self._open.clear()
        return outcomes

    def commit(self, version: int) -> None:
        """Puts the plan of a version in force. Raises `Diverged` if nothing leads to it. Mutates."""
        while self.plan.version < version:
            if not self._uncommitted:
                raise Diverged(f"plan {version} was in force, and the decisions lead to plan {self.plan.version} alone")
            self._carry_out(self._uncommitted.popleft())

    def _carry_out(self, transition: Transition) -> None:
        self.plan = transition.apply(self.plan)
        if isinstance(transition, ResizeKVPool):
            more = transition.after - transition.before
            if more >= 0:
                self._core.scheduler.grow(more)
            else:
                self._core.scheduler.shrink(-more, lambda moves: None)
        self._core.replan(assignment_id(self.plan.instances[0].layer_precisions), _plan_fields(self.plan))


class _Replay:
    """The events of a recording, in the order of their times."""

    def __init__(self, recording: Recording, policy: Policy | None):
        facts, plan = recording.facts, from_yaml(json.dumps(recording.facts["plan"]))
        resources = _resources(facts["resources"])
        if policy is None:
            policy = load_policy(facts["policy"], resources, facts["swap_order"], slo_ttft=facts["slo_ttft"])
        self._recording, self._clock = recording, VirtualClock()
        self._arrivals: dict[int, list[Arrival]] = {}  # by the step that they came before
        for arrival in recording.arrivals:
            self._arrivals.setdefault(arrival.step, []).append(arrival)
        self._came = 0
        self._ticks = deque(recording.ticks)
        self._decisions: list[Decided] = []
        self._core = self._new_core(plan)
        timing = RecordedTiming(recording.steps, self._clock)
        self._instance = SimInstance(self._core, plan.instances[0], timing, _buckets(facts), self._clock)
        self._actuator = _Actuator(plan, self._core)
        self._controller = Controller(plan, policy, resources, self._actuator)

    def run(self) -> Replayed:
        """All of it."""
        while (due := self._due()) < inf:
            self._look_until(due - SAME_TIME)
            self._clock.time = due
            if self._instance.wake == inf:
                self._instance.call(lambda: None)
            for _ in self._instance.advance():
                pass
        self._look_until(inf)
        if len(self._decisions) < len(self._recording.decisions):
            raise Diverged(f"recorded, and not decided: {self._recording.decisions[len(self._decisions)]}")
        return Replayed(tuple(self._decisions), self._core.begun, self._actuator.plan)

    # -- what the core asks for

    def coming(self) -> Step | None:
        """The recorded step that is next to begin; None after the last one."""
        number = self._core.begun
        return self._recording.steps[number] if number < len(self._recording.steps) else None

    def may_begin(self, step: Step, now: float) -> bool:
        """Whether the real step had begun: it was behind another one, as this one is then, or began by itself."""
        behind = step.number > 0 and step.begun < self._recording.steps[step.number - 1].ended
        return behind or now >= step.begun

    def take_in(self, step: Step) -> None:
        """What was there when a step began, which is a little later than now: plan, requests, decisions. Mutates."""
        self._look_until(step.begun)
        self._actuator.commit(step.version)
        for arrival in self._arrivals.pop(step.number, ()):
            self._came += 1
            params = SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True, seed=0)
            prompt = (self._came,) * arrival.prompt_tokens  # like no other
            self._core.add(Request(arrival.id, prompt, params, arrival.time, priority=arrival.priority, stream=False))

    # -- events

    def _due(self) -> float:
        """When something is to happen in the instance: a step ends, or one begins on an idle device."""
        step = self.coming() if self._instance.wake == inf else None
        return self._instance.wake if step is None else step.begun

    def _look_until(self, end: float) -> None:
        """All ticks of the controller up to `end`. Mutates."""
        while self._ticks and _time_of(self._ticks[0]) <= end:
            self._tick(self._ticks.popleft())

    def _tick(self, tick: Tick) -> None:
        self._actuator.tick = tick
        ((time, version),) = tick.seen
        if self._core.plan_fields.plan_version < version:  # put in force while there was no step
            self._actuator.commit(version)
        self._controller.tick(tick.time, [self._core.seen(time, version)])
        if (decided := decided_at(self._controller, tick.time)) is not None:
            expected = self._recording.decisions[len(self._decisions) :][:1]
            if (decided,) != expected:
                raise Diverged(f"at {tick.time:.6f} s was decided {decided}, recorded {expected or 'nothing'}")
            self._decisions.append(decided)

    def _new_core(self, plan: Plan) -> _Core:
        facts, (instance,) = self._recording.facts, plan.instances
        buckets, longest, size = _buckets(facts), facts["max_model_len"], facts["page_size"]
        width = ceil_div(longest, size)
        least, most = facts["resources"]["min_pages"], facts["reserved_kv_pages"]
        pages = PagePool(instance.kv_pages, caching=facts["prefix_caching"], least=least, most=most)
        limits = SchedulerLimits(buckets.max_num_seqs, buckets.max_tiles, buckets.tile, size)
        scheduler = Scheduler(limits, pages, PageTable(buckets.max_num_seqs, max(width, *buckets.widths)))
        most = WITHOUT_LIMIT
        info = ModelInfo(facts["model"], longest, most, 1, 0, max_queued_requests=most, max_queued_tokens=most)
        salt = assignment_id(instance.layer_precisions)
        return _Core(self, scheduler, info, None, EngineMetrics(info.name), salt=salt, plan_fields=_plan_fields(plan))


def _check(recording: Recording) -> None:
    """Raises `ConfigError` for what cannot be repeated."""
    if (instances := len(recording.facts["plan"]["instances"])) > 1:
        raise ConfigError(f"a replay takes a run of one instance, this one has {instances} (dp)")
    if not recording.facts["overlap"]:
        raise ConfigError("a run whose steps do not overlap cannot be replayed (overlap)")
    for arrival in recording.arrivals:
        if arrival.answers != 1:
            raise ConfigError(f"request {arrival.id} has {arrival.answers} answers; a replay takes requests with one")
    for answer in recording.answers.values():
        if answer.reason != "length":
            raise ConfigError(
                f"request {answer.id} ended by {answer.reason!r}; a replay takes answers that end by their length "
                "(ignore_eos)"
            )
        if answer.cached_tokens:
            raise ConfigError(f"request {answer.id} shared {answer.cached_tokens} tokens of its prompt with others")


def _time_of(tick: Tick) -> float:
    """When the controller had seen what it saw: it asks for the time first."""
    ((seen, _),) = tick.seen
    return max(tick.time, float(seen))


def _plan_fields(plan: Plan) -> Snapshot:
    """The fields of a snapshot that follow from the plan, but for bytes, which no policy decides by."""
    (instance,) = plan.instances
    layers = dict(Counter(instance.layer_precisions))
    return Snapshot(kv_pages_total=instance.kv_pages - 1, plan_version=plan.version, layers_by_precision=layers)


def _buckets(facts: Mapping[str, Any]) -> Buckets:
    return Buckets(**{**facts["buckets"], "widths": tuple(facts["buckets"]["widths"])})


def _resources(value: Mapping[str, Any]) -> Resources:
    layers = {(block, precision): size for block, precision, size in value["layer_bytes"]}
    sequences = {name: tuple(value[name]) for name in ("fixed", "page_bytes", "segments", "kept") if name in value}
    return Resources(**{**value, **sequences, "layer_bytes": layers})
