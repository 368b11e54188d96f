"""The controller, which asks the policy at a fixed interval and has actuators carry out the plans that it wants.

    snapshot -> smoothing -> policy -> plan -> validate, diff -> actuator -> plan in force

Every instance has its own state of the policy, decision under way, failures and actuator, so that one that fails or is
slow holds up no other. The set of instances has a control of its own (`control.structure`). Time is an argument, and
only the actuators have effects.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count, islice

from jaxserve.control.diff import diff, diff_all
from jaxserve.control.instance_controller import Backoff, Failures, InstanceController
from jaxserve.control.plan import InstancePlan, Plan, PlanInForce
from jaxserve.control.plan_edits import PlanEdit, PlanEditor
from jaxserve.control.policy import Policy, ServiceView
from jaxserve.control.record import BY_OPERATOR, Decision, HistorySample, sample
from jaxserve.control.regroup import has_same_instances
from jaxserve.control.resources import Resources, validate
from jaxserve.control.structure import RegroupActuator, StructureController
from jaxserve.control.transitions import Actuator
from jaxserve.telemetry import Smoother, Snapshot, WaitingRoom

log = logging.getLogger(__name__)

DECISIONS = 1000  # latest decisions that are remembered
HISTORY = 15 * 60  # latest samples that are remembered
HISTORY_INTERVAL = 1.0  # s between two samples
MAX_NOTES = 4  # notes of instances in the note about all


class Controller:
    """A controller of the plan in force. One thread calls `tick`; other methods may be called from any thread."""

    def __init__(
        self,
        in_force: PlanInForce,
        policy: Policy,
        resources: Resources,
        actuators: Mapping[str, Actuator],
        *,
        regrouper: RegroupActuator | None = None,
        tick: float = 0.1,
        window: float = 5.0,
        backoff: Backoff | None = None,
    ):
        """Control the instances of the plan in force, to which policies return.

        `actuators` always has those of the instances in force, by name. Without a `regrouper`, the set of instances
        never changes. `tick` is the interval between decisions in seconds, and `window` the seconds over which
        snapshots are smoothed. Raise `ConfigError` if the policy cannot begin.
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
        self._start, self._actuators, self._window = in_force.plan, actuators, window
        self._backoff = Backoff() if backoff is None else backoff
        self._regrouper = regrouper
        self._instances: dict[str, InstanceController] = {}
        self._structure = StructureController(
            policy, self._start, resources, in_force, regrouper, self._backoff, self._record, self._lock
        )
        self._begin_counting(policy)
        self._follow_instances()

    def _begin_counting(self, policy: Policy) -> None:
        """Let the counts of a policy's decisions begin at 0."""
        self._ended.update({(policy.name, outcome): 0 for outcome in ("done", "failed", "rejected")})

    def _follow_instances(self) -> None:
        """Begin to control instances that are new in the plan in force, and forget those that have ended."""
        plans = {plan.name: plan for plan in self._in_force.plan.instances}
        followed: dict[str, InstanceController] = {}
        for name, plan in plans.items():
            known, actuator = self._instances.get(name), self._actuators.get(name)
            if actuator is None:
                continue  # it has ended since the plan was read
            if known is None or known.actuator is not actuator:
                known = InstanceController(
                    home(plan, self._start, self._resources),
                    self.policy,
                    self._resources,
                    self._in_force,
                    actuator,
                    Smoother(self._window),
                    self._backoff,
                    self._record,
                    self._lock,
                )
                known.held = self._structure.holds(name)
            followed[name] = known
        if followed != self._instances:
            with self._lock:
                self._instances = followed

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
        if self._structure.target is not None:
            return replace(self._structure.target, version=plan.version + 1)
        targets = {
            name: target for name, instance in self._instances.items() if (target := instance.target) is not None
        }
        if not targets:
            return None
        changes = [(old, targets[old.name]) for old in plan.instances if old.name in targets]
        remaining = sum(len(diff(old, new, self._resources)) for old, new in changes)
        return Plan(plan.version + remaining, tuple(targets.get(old.name, old) for old in plan.instances))

    @property
    def regrouping(self) -> bool:
        """True while the set of instances is changing."""
        return self._structure.target is not None

    def edited(self, edit: PlanEdit) -> Plan:
        """Return the plan in force with a change of its instances. Raise `PlanError` if the change is impossible."""
        return PlanEditor(self._start, self._resources, self._in_force.used_names).edited(self.plan, edit)

    @property
    def busy(self) -> bool:
        """True while a decision is being carried out, or KV pages are on their way after it."""
        structure, instances = self._structure, self._instances.values()
        changing = structure.target is not None or any(instance.target is not None for instance in instances)
        return changing or bool(structure.exchanging)

    @property
    def exchanging(self) -> frozenset[str]:
        """The names of instances whose KV pages are on their way."""
        return self._structure.exchanging

    @property
    def failed(self) -> frozenset[str]:
        """The names of instances that have failed and whose requests wait for others in their place."""
        return self._structure.failed

    @property
    def notes(self) -> Mapping[str, str]:
        """Reasons for which the policy keeps the plans of instances, by their names."""
        return {name: instance.note for name, instance in self._instances.items() if instance.note}

    @property
    def note(self) -> str:
        """The notes of all instances as one text."""
        several = len(self._instances) > 1
        notes = [f"instance {name}: {note}" if several else note for name, note in self.notes.items()]
        left = [f"{len(notes) - MAX_NOTES} more"] if len(notes) > MAX_NOTES else []
        return "; ".join([*filter(None, [self._structure.note]), *notes[:MAX_NOTES], *left])

    def set_policy(self, policy: Policy) -> None:
        """Let another policy decide from the next tick on.

        It goes on from the plan in force, and transitions that have been started are finished. A tick in another thread
        whose policy does not answer changes nothing any more, so that a new thread may tick. Raise `ConfigError`, with
        nothing changed, if the policy cannot begin.
        """
        states = {name: instance.first_state(policy) for name, instance in self._instances.items()}
        structure = self._structure.first_state(policy)
        with self._lock:
            self.policy, self._turn = policy, None
            self._begin_counting(policy)
            self._structure.set_policy(policy, structure)
            for name, instance in self._instances.items():
                instance.set_policy(policy, states[name] if name in states else instance.first_state(policy))
        self._in_force.tell()  # of what may come into force under this policy

    def change_policy(self, now: float, policy: Policy, change: str, why: str = BY_OPERATOR) -> None:
        """Set another policy, and record this as a decision without transitions, with the reason `why` it was set.

        Raise `ConfigError`, with nothing changed, if the policy cannot begin.
        """
        self.set_policy(policy)
        with self._lock:
            version = self._in_force.version
            self._record(Decision(now, policy.name, f"{why}{change}", version, version, (), "done"))

    def check(self, plan: Plan) -> None:
        """Raise `PlanError` if a plan does not fit, or cannot be reached from the plan in force."""
        if not has_same_instances(self.plan, plan):
            self._structure.check(plan)
            return
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

    def tick(
        self,
        now: float,
        snapshots: Mapping[str, Snapshot],
        waiting: WaitingRoom | None = None,
        longest: Callable[[str], int] = lambda name: 0,
    ) -> None:
        """Take the outcomes of transitions, and ask the policy for every instance that is not changing.

        `snapshots` are the latest ones of all instances by name, however old. `waiting` is what no instance can hold,
        and `longest` as in `ServiceView`. Does nothing before the next tick is due.
        """
        if now < self._due:
            return
        self._due = now + self.interval
        self._turn = turn = object()
        self._follow_instances()
        for name, instance in self._instances.items():
            if name in snapshots:  # it may have begun since these were taken
                instance.tick(now, snapshots[name])
            if self._turn is not turn:  # the policy was changed while it was asked
                return
        seen = {name: instance.seen for name, instance in self._instances.items()}
        room = waiting or WaitingRoom()
        view = ServiceView(
            now, seen, room, longest, self._is_warm, self._in_force.used_names, self._structure.exchanging
        )
        self._structure.tick(now, view, self._instances)
        if now >= self._sample_due and self._turn is turn:
            self._sample_due = now + HISTORY_INTERVAL
            plan = self.plan
            with self._lock:
                self.history.append(sample(now, plan, seen, self._resources, room.count))

    def can_recover(self, name: str) -> bool:
        """Return whether the requests of an instance that fails now can go on. Call from any thread."""
        return self._structure.can_recover(name)

    def _is_warm(self, plan: InstancePlan) -> bool:
        return self._regrouper is not None and self._regrouper.is_warm(plan)

    def stop(self) -> None:
        """Let no tick change anything from now on. A tick may still wait for its policy in another thread."""
        with self._lock:
            self._turn = None
            self._structure.stop()
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


def home(plan: InstancePlan, start: Plan, resources: Resources) -> InstancePlan:
    """Return the plan that policies return an instance to: that of the start on its devices, if there was one.

    Otherwise its layers have the precisions of the start, and it has as many KV pages as fit besides these.
    """
    for instance in start.instances:
        if instance.same_place(plan):
            return replace(instance, name=plan.name)
    usual = plan.with_precisions(start.instances[0].precisions)
    return usual.with_kv_pages(resources.kv_capacity(usual))


def _log(decision: Decision) -> None:
    level = logging.INFO if decision.outcome in ("started", "done") else logging.WARNING
    versions = (decision.before_version, decision.target_version)
    log.log(level, "plan %d -> %d by %s, %s: %s", *versions, decision.policy, decision.outcome, decision.reason)
