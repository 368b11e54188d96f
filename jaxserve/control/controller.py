"""The controller, which asks the policy at a fixed interval and has the actuator carry out the plan that it wants.

    snapshots -> smoothing -> policy -> plan -> validate, diff -> actuator -> plan in force

Time is an argument, and only the actuator has effects. The plan in force changes only by committed transitions.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.control.diff import diff
from jaxserve.control.plan import Plan
from jaxserve.control.policy import Policy
from jaxserve.control.record import Decision, HistorySample, sample
from jaxserve.control.resources import Resources, validate
from jaxserve.control.transitions import Actuator, Transition
from jaxserve.core.errors import PlanError
from jaxserve.telemetry import Smoother, Snapshot

log = logging.getLogger(__name__)

DECISIONS = 1000  # latest decisions that are remembered
HISTORY = 15 * 60  # latest samples that are remembered
HISTORY_INTERVAL = 1.0  # s between two samples


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
    """A controller of the plan in force. Only one thread at a time may call its methods."""

    def __init__(
        self,
        plan: Plan,
        policy: Policy,
        resources: Resources,
        actuator: Actuator,
        *,
        tick: float = 0.1,
        window: float = 5.0,
        backoff: Backoff | None = None,
    ):
        """`plan` is in force now, and policies return to it. `tick` is the interval between decisions in seconds, and
        `window` the seconds over which snapshots are smoothed.
        """
        self.interval = tick
        self.plan = plan
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS)
        self.history: deque[HistorySample] = deque(maxlen=HISTORY)
        self.note = ""  # why the policy keeps the plan
        self.failures = Failures()
        self._start, self._resources, self._actuator = plan, resources, actuator
        self._backoff = Backoff() if backoff is None else backoff
        self._smoothers = [Smoother(window) for _ in plan.instances]
        self._due = self._sample_due = float("-inf")
        self._pending: list[Transition] = []  # started, but not ended
        self._state_when_done: Any = None  # the policy's next state, if the pending transitions succeed
        self._target: Plan | None = None
        self._open: Decision | None = None  # the decision that is being carried out
        self.set_policy(policy)

    @property
    def target(self) -> Plan | None:
        """Plan that is being carried out, or None."""
        return self._target

    @property
    def busy(self) -> bool:
        """True while a decision is being carried out."""
        return self._target is not None

    def set_policy(self, policy: Policy) -> None:
        """Let another policy decide from the next tick on. Transitions that have been started are finished."""
        self.policy = policy
        self._state: Any = policy.init(self._start)
        self._state_when_done = self._state
        self.note = ""
        self.failures = Failures()

    def change_policy(self, now: float, policy: Policy, change: str) -> None:
        """Let an operator set another policy, and record this as a decision without transitions."""
        self.set_policy(policy)
        self._record(self._decision(now, f"by the operator: {change}", self.plan, "done"))

    def check(self, plan: Plan) -> None:
        """Raise `PlanError` if a plan does not fit, or cannot be reached from the plan in force."""
        diff(self.plan, plan, self._resources)
        validate(plan, self._resources)

    def tick(self, now: float, snapshots: Sequence[Snapshot]) -> None:
        """Take the outcomes of transitions, and ask the policy if no transition is under way.

        `snapshots` are the latest ones of all instances, however old. Does nothing before the next tick is due.
        """
        if now < self._due:
            return
        self._due = now + self.interval
        # Asked before the outcomes are taken: if the actuator is not busy, all outcomes are available.
        busy = self._actuator.busy
        self._take_outcomes(now, busy)
        seen = [s.observe(snapshot.at(now)) for s, snapshot in zip(self._smoothers, snapshots, strict=True)]
        if now >= self._sample_due:
            self._sample_due = now + HISTORY_INTERVAL
            self.history.append(sample(now, self.plan, seen, self._resources))
        if not busy and now >= self.failures.until:
            self._decide(now, seen)

    # -- decisions

    def _decide(self, now: float, snapshots: Sequence[Snapshot]) -> None:
        """Ask the policy, and start the transitions to the plan that it wants.

        A policy that raises is treated like one whose plan does not fit. The policy's new state is adopted when its
        plan has been carried out, so that a decision that failed leaves no trace in it.
        """
        reason, plan = "the policy failed", self.plan
        try:
            proposal = self.policy.update(snapshots, self.plan, self._state)
            reason, plan = proposal.reason, proposal.plan
            if plan.instances == self.plan.instances:
                self._state, self.note = proposal.state, reason
                return
            validate(plan, self._resources)
            transitions = diff(self.plan, plan, self._resources)
        except PlanError as error:
            self._reject(now, reason, plan, str(error))
            return
        except Exception as error:
            log.exception("policy %s failed; plan %d stays", self.policy.name, self.plan.version)
            self._reject(now, reason, self.plan, f"{type(error).__name__}: {error}")
            return
        self._target, self.note = replace(plan, version=self.plan.version + len(transitions)), ""
        self._pending, self._state_when_done = list(transitions), proposal.state
        self._open = self._decision(now, reason, self._target, "started", tuple(map(str, transitions)))
        self._record(self._open)
        self._actuator.start(transitions)

    def _take_outcomes(self, now: float, busy: bool) -> None:
        """Apply committed transitions to the plan in force, and end the decision after the last one or a failure."""
        for outcome in self._actuator.poll():
            transition = self._pending.pop(0)
            assert transition == outcome.transition, (transition, outcome)
            if outcome.error is not None:
                self._end(f"failed: {transition}: {outcome.error}")
                self._fail(now)
            else:
                self.plan = transition.apply(self.plan)
                if not self._pending:
                    self._end("done")
                    self._state = self._state_when_done
                    self.failures = Failures()
        if self._pending and not busy:
            self._end(f"failed: {self._pending[0]} was dropped")
            self._fail(now)

    def _end(self, outcome: str) -> None:
        """Record the outcome of the decision under way, which operators' decisions may have followed in the list."""
        assert self._open is not None
        ended = replace(self._open, outcome=outcome)
        if self._open in self.decisions:
            self.decisions[self.decisions.index(self._open)] = ended
        self._pending, self._target, self._open = [], None, None
        _log(ended)

    def _reject(self, now: float, reason: str, plan: Plan, error: str) -> None:
        self.note = ""
        self._record(self._decision(now, reason, plan, f"rejected: {error}"))
        self._fail(now)

    def _fail(self, now: float) -> None:
        count = self.failures.count + 1
        self.failures = Failures(count, now + self._backoff.delay(count))

    def _decision(
        self, now: float, reason: str, target: Plan, outcome: str, transitions: tuple[str, ...] = ()
    ) -> Decision:
        return Decision(now, self.policy.name, reason, self.plan.version, target.version, transitions, outcome)

    def _record(self, decision: Decision) -> None:
        self.decisions.append(decision)
        _log(decision)


def _log(decision: Decision) -> None:
    level = logging.INFO if decision.outcome in ("started", "done") else logging.WARNING
    versions = (decision.before_version, decision.target_version)
    log.log(level, "plan %d -> %d by %s, %s: %s", *versions, decision.policy, decision.outcome, decision.reason)
