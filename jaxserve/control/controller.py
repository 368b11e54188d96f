"""The controller, which asks the policy at a fixed interval and has actuators carry out the plans that it wants.

    snapshot -> smoothing -> policy -> plan -> validate, diff -> actuator -> plan in force

Every instance has its own state of the policy, decision under way, failures and actuator, so that one that fails or is
slow holds up no other. Time is an argument, and only the actuators have effects.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

from jaxserve.control.diff import diff, diff_all
from jaxserve.control.plan import InstancePlan, Plan, PlanInForce
from jaxserve.control.policy import Policy, errors_of_policy
from jaxserve.control.record import Decision, HistorySample, sample
from jaxserve.control.resources import Resources, validate, validate_instance
from jaxserve.control.transitions import Actuator, Transition
from jaxserve.core.errors import PlanError
from jaxserve.telemetry import Smoother, Snapshot

log = logging.getLogger(__name__)

DECISIONS = 1000  # latest decisions that are remembered
HISTORY = 15 * 60  # latest samples that are remembered
HISTORY_INTERVAL = 1.0  # s between two samples
MAX_NOTES = 4  # notes of instances in the note about all


@dataclass(frozen=True)
class Backoff:
    """Exponential back-off after consecutive failures, in seconds."""

    first: float = 1.0
    factor: float = 2.0
    max_delay: float = 60.0

    def delay(self, failures: int) -> float:
        """Return how long to wait after this number of consecutive failures (at least 1)."""
        return min(self.max_delay, self.first * self.factor ** min(failures - 1, 64))


@dataclass(frozen=True)
class Failures:
    """Consecutive failures, and the time before which the policy is not asked again."""

    count: int = 0
    until: float = float("-inf")


class Controller:
    """A controller of the plan in force. One thread calls `tick`; other methods may be called from any thread."""

    def __init__(
        self,
        in_force: PlanInForce,
        policy: Policy,
        resources: Resources,
        actuators: Mapping[str, Actuator],
        *,
        tick: float = 0.1,
        window: float = 5.0,
        backoff: Backoff | None = None,
    ):
        """Control the instances of the plan in force, to which policies return. `actuators` are by instance.

        `tick` is the interval between decisions in seconds, and `window` the seconds over which snapshots are smoothed.
        Raise `ConfigError` if the policy cannot begin.
        """
        self.interval = tick
        self.policy = policy
        self.history: deque[HistorySample] = deque(maxlen=HISTORY)
        self._in_force, self._resources = in_force, resources
        self._decisions: dict[int, Decision] = {}  # the latest, by number
        self._ended: Counter[tuple[str, ...]] = Counter()  # number by policy and outcome
        self._numbers = count()
        self._lock = threading.RLock()
        self._due = self._sample_due = float("-inf")
        self._turn: object | None = None  # of the tick that may change something
        backoff = Backoff() if backoff is None else backoff
        self._instances = {
            instance.name: InstanceController(
                instance,
                policy,
                resources,
                in_force,
                actuators[instance.name],
                Smoother(window),
                backoff,
                self._record,
                self._lock,
            )
            for instance in in_force.plan.instances
        }

    @property
    def plan(self) -> Plan:
        """Plan in force."""
        return self._in_force.plan

    @property
    def decisions(self) -> list[Decision]:
        """The latest decisions, in order."""
        return self.latest_decisions(DECISIONS)

    @property
    def ended(self) -> dict[tuple[str, ...], int]:
        """The number of decisions that have ended, by policy and outcome ("done", "failed" or "rejected")."""
        with self._lock:
            return dict(self._ended)

    @property
    def target(self) -> Plan | None:
        """The plan in force with all changes under way; None if there are none."""
        plan = self.plan
        targets = {
            name: target for name, instance in self._instances.items() if (target := instance.target) is not None
        }
        if not targets:
            return None
        changes = [(old, targets[old.name]) for old in plan.instances if old.name in targets]
        remaining = sum(len(diff(old, new, self._resources)) for old, new in changes)
        return Plan(plan.version + remaining, tuple(targets.get(old.name, old) for old in plan.instances))

    @property
    def busy(self) -> bool:
        """True while a decision is being carried out."""
        return any(instance.target is not None for instance in self._instances.values())

    @property
    def notes(self) -> Mapping[str, str]:
        """Why the policy keeps the plans of instances, by their names."""
        return {name: instance.note for name, instance in self._instances.items() if instance.note}

    @property
    def note(self) -> str:
        """The notes of all instances as one text."""
        several = len(self._instances) > 1
        notes = [f"instance {name}: {note}" if several else note for name, note in self.notes.items()]
        left = [f"{len(notes) - MAX_NOTES} more"] if len(notes) > MAX_NOTES else []
        return "; ".join([*notes[:MAX_NOTES], *left])

    def set_policy(self, policy: Policy) -> None:
        """Let another policy decide from the next tick on.

        It goes on from the plan in force, and transitions that have been started are finished. A tick in another thread
        whose policy does not answer changes nothing any more, so that a new thread may tick. Raise `ConfigError`, with
        nothing changed, if the policy cannot begin.
        """
        states = {name: instance.first_state(policy) for name, instance in self._instances.items()}
        with self._lock:
            self.policy, self._turn = policy, None
            for name, instance in self._instances.items():
                instance.set_policy(policy, states[name])

    def change_policy(self, now: float, policy: Policy, change: str) -> None:
        """Let an operator set another policy, and record this as a decision without transitions.

        Raise `ConfigError`, with nothing changed, if the policy cannot begin.
        """
        self.set_policy(policy)
        with self._lock:
            version = self._in_force.version
            self._record(Decision(now, policy.name, f"by the operator: {change}", version, version, (), "done"))

    def check(self, plan: Plan) -> None:
        """Raise `PlanError` if a plan does not fit, or cannot be reached from the plan in force."""
        diff_all(self.plan, plan, self._resources)
        validate(plan, self._resources)

    def latest_decisions(self, limit: int) -> list[Decision]:
        """Return at most `limit` of the latest decisions, the oldest first."""
        with self._lock:
            return list(islice(reversed(self._decisions.values()), max(0, limit)))[::-1]

    def samples_since(self, time: float) -> list[HistorySample]:
        """Return the samples that were taken after a time (s)."""
        with self._lock:
            return [sample for sample in self.history if sample.time > time]

    def failures(self, instance: str) -> Failures:
        """Return the consecutive failures of an instance."""
        return self._instances[instance].failures

    def tick(self, now: float, snapshots: Mapping[str, Snapshot]) -> None:
        """Take the outcomes of transitions, and ask the policy for every instance that is not changing.

        `snapshots` are the latest ones of all instances by name, however old. Does nothing before the next tick is due.
        """
        if now < self._due:
            return
        self._due = now + self.interval
        self._turn = turn = object()
        for name, instance in self._instances.items():
            instance.tick(now, snapshots[name])
            if self._turn is not turn:  # the policy was changed while it was asked
                return
        if now >= self._sample_due:
            self._sample_due = now + HISTORY_INTERVAL
            seen = {name: instance.seen for name, instance in self._instances.items()}
            with self._lock:
                self.history.append(sample(now, self.plan, seen, self._resources))

    def stop(self) -> None:
        """Let no tick change anything from now on. A tick may still wait for its policy in another thread."""
        with self._lock:
            self._turn = None
            for instance in self._instances.values():
                instance.stop()

    def _record(self, decision: Decision, number: int | None = None) -> int:
        """Log a decision and keep it, in the place of the one with a number if that is given. Return its number."""
        if decision.instance and len(self._instances) > 1:
            decision = replace(decision, reason=f"instance {decision.instance}: {decision.reason}")
        with self._lock:
            if number is None:
                number = next(self._numbers)
                self._decisions[number] = decision
                if len(self._decisions) > DECISIONS:
                    del self._decisions[next(iter(self._decisions))]
            elif number in self._decisions:
                self._decisions[number] = decision
            if decision.outcome != "started":
                self._ended[decision.policy, decision.outcome.partition(":")[0]] += 1
        _log(decision)
        return number


class InstanceController:
    """The control of one instance: its policy's state, the decision under way, and its failures."""

    def __init__(
        self,
        start: InstancePlan,
        policy: Policy,
        resources: Resources,
        in_force: PlanInForce,
        actuator: Actuator,
        smoother: Smoother,
        backoff: Backoff,
        record: Callable[..., int],
        lock: threading.RLock,
    ):
        """Return to `start` under policies that do. `record` keeps decisions; `lock` guards what other threads use."""
        self._start, self._resources, self._in_force = start, resources, in_force
        self._actuator, self._smoother, self._backoff = actuator, smoother, backoff
        self._record, self._lock = record, lock
        self.seen = Snapshot()  # smoothed, at the latest tick
        self._asked: object | None = None  # stands for the question that the policy may still answer
        self._pending: list[Transition] = []  # started, but not ended
        self._state_when_done: Any = None  # the policy's next state, if the pending transitions succeed
        self._open: tuple[int, Decision] | None = None  # the decision that is being carried out, and its number
        self.target: InstancePlan | None = None
        """The plan that is being carried out, or None."""
        self.set_policy(policy, self.first_state(policy))

    def first_state(self, policy: Policy) -> Any:
        """Return a policy's first state. Raise `ConfigError` if the policy raises."""
        with errors_of_policy(f"policy {policy.name}: init"):
            return policy.init(self._start)

    def set_policy(self, policy: Policy, state: Any) -> None:
        """Let another policy decide from the next tick on, beginning with its first state."""
        self._policy, self._asked = policy, None
        self._state = self._state_when_done = state
        self.note = ""  # why the policy keeps the plan
        self.failures = Failures()

    def stop(self) -> None:
        """Adopt no answer any more of a policy that has been asked."""
        self._asked = None

    def tick(self, now: float, snapshot: Snapshot) -> None:
        """Take the outcomes of transitions, and ask the policy if none is under way and no failure was too recent."""
        # Asked before the outcomes are taken: if the actuator is not busy, all outcomes are available.
        busy = self._actuator.busy
        if self._pending:
            with self._lock:
                self._take_outcomes(now, busy)
        self.seen = self._smoother.observe(snapshot, now)
        if not busy and now >= self.failures.until:
            self._decide(now)

    def _decide(self, now: float) -> None:
        """Ask the policy, and start the transitions to the plan that it wants.

        A policy that raises is treated like one whose plan does not fit. The policy's new state is adopted when its
        plan has been carried out, so that a decision that failed leaves no trace in it. The policy is asked without
        the lock, because it may take long. Its answer counts only if it has not been replaced meanwhile.
        """
        policy, plan = self._policy, self._in_force.instance(self._start.name)
        self._asked = asked = object()
        reason, wanted, error = "the policy failed", plan, ""
        transitions: tuple[Transition, ...] = ()
        try:
            proposal = policy.update(self.seen, plan, self._state)
            reason, wanted, state = proposal.reason, proposal.plan, proposal.state
            if wanted != plan:
                validate_instance(wanted, self._resources)
                transitions = diff(plan, wanted, self._resources)
        except PlanError as refused:
            error = str(refused)
        except Exception as failure:
            log.exception("policy %s failed; the plan of instance %s stays", policy.name, plan.name)
            error, wanted = f"{type(failure).__name__}: {failure}", plan
        with self._lock:
            if asked is not self._asked:
                return
            if error:
                self._reject(now, reason, error)
            elif not transitions:
                self._state, self.note = state, reason
            else:
                self._begin(now, reason, wanted, transitions, state)

    def _begin(
        self, now: float, reason: str, target: InstancePlan, transitions: Sequence[Transition], state: Any
    ) -> None:
        self.target, self.note = target, ""
        self._pending, self._state_when_done = list(transitions), state
        decision = self._decision(now, reason, "started", tuple(map(str, transitions)))
        self._open = self._record(decision), decision
        self._actuator.start(transitions)

    def _take_outcomes(self, now: float, busy: bool) -> None:
        """End the decision under way after the last outcome or a failure."""
        for outcome in self._actuator.poll():
            transition = self._pending.pop(0)
            assert transition == outcome.transition, (transition, outcome)
            if outcome.error is not None:
                self._end(f"failed: {transition}: {outcome.error}")
                self._fail(now)
            elif not self._pending:
                self._end("done")
                self._state = self._state_when_done
                self.failures = Failures()
        if self._pending and not busy:
            self._end(f"failed: {self._pending[0]} was dropped")
            self._fail(now)

    def _end(self, outcome: str) -> None:
        assert self._open is not None
        number, decision = self._open
        self._record(replace(decision, outcome=outcome), number)
        self._pending, self.target, self._open = [], None, None

    def _reject(self, now: float, reason: str, error: str) -> None:
        self.note = ""
        self._record(self._decision(now, reason, f"rejected: {error}"))
        self._fail(now)

    def _fail(self, now: float) -> None:
        count = self.failures.count + 1
        self.failures = Failures(count, now + self._backoff.delay(count))

    def _decision(self, now: float, reason: str, outcome: str, transitions: tuple[str, ...] = ()) -> Decision:
        version = self._in_force.version
        target = version + len(transitions)
        return Decision(now, self._policy.name, reason, version, target, transitions, outcome, self._start.name)


def _log(decision: Decision) -> None:
    level = logging.INFO if decision.outcome in ("started", "done") else logging.WARNING
    versions = (decision.before_version, decision.target_version)
    log.log(level, "plan %d -> %d by %s, %s: %s", *versions, decision.policy, decision.outcome, decision.reason)
