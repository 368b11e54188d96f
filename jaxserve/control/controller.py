"""Controller: asks the policy at a fixed tick, and has the actuator carry out what it wants.

    snapshots -> smoothing -> policy -> plan -> validate, diff -> actuator -> plan in force

Time is an argument, all effects are the actuator's, and the plan in force changes by committed transitions alone.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.control.diff import diff
from jaxserve.control.plan import Plan
from jaxserve.control.policy import Policy
from jaxserve.control.record import Decision, Sample, sample
from jaxserve.control.resources import Resources, validate
from jaxserve.control.transitions import Actuator, Transition
from jaxserve.core.errors import PlanError
from jaxserve.telemetry import Smoother, Snapshot

log = logging.getLogger(__name__)

DECISIONS = 1000  # kept
HISTORY = 15 * 60  # samples kept
HISTORY_INTERVAL = 1.0  # s


@dataclass(frozen=True)
class Backoff:
    """How long to wait after failures in a row, in seconds."""

    first: float = 1.0
    factor: float = 2.0
    most: float = 60.0

    def delay(self, failures: int) -> float:
        """After so many failures, at least one."""
        return min(self.most, self.first * self.factor ** min(failures - 1, 64))


@dataclass(frozen=True)
class Failures:
    """Failures in a row, and until when the policy is not asked."""

    count: int = 0
    until: float = float("-inf")


class Controller:
    """Holds the plan in force. One thread at a time may call its methods."""

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
        """`plan` is in force now, and what policies return to. `tick` and `window` (of the smoothing) are seconds."""
        self.interval = tick
        self.plan = plan
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS)
        self.history: deque[Sample] = deque(maxlen=HISTORY)
        self.note = ""  # what the policy waits for
        self.failures = Failures()
        self._start, self._resources, self._actuator = plan, resources, actuator
        self._backoff = Backoff() if backoff is None else backoff
        self._smoothers = [Smoother(window) for _ in plan.instances]
        self._due = self._sample_due = float("-inf")
        self._pending: list[Transition] = []  # started, and not ended
        self._decided: Any = None  # the policy's state once they have ended well
        self._target: Plan | None = None
        self._open: Decision | None = None  # the one that is being carried out
        self.set_policy(policy)

    @property
    def target(self) -> Plan | None:
        """The plan that is being carried out; None if none is."""
        return self._target

    @property
    def busy(self) -> bool:
        """Whether a decision is being carried out."""
        return self._target is not None

    def set_policy(self, policy: Policy) -> None:
        """Lets another policy decide from the next tick on; what has been started is finished. Mutates."""
        self.policy = policy
        self._state: Any = policy.init(self._start)
        self._decided = self._state
        self.note = ""
        self.failures = Failures()

    def change_policy(self, now: float, policy: Policy, change: str) -> None:
        """As `set_policy`, by an operator: logged as a decision without transitions. Mutates."""
        self.set_policy(policy)
        self._record(self._decision(now, f"by the operator: {change}", self.plan, "done"))

    def check(self, plan: Plan) -> None:
        """Raises `PlanError` for a plan that transitions cannot lead to, or that does not fit."""
        diff(self.plan, plan, self._resources)
        validate(plan, self._resources)

    def tick(self, now: float, snapshots: Sequence[Snapshot]) -> None:
        """Takes what the actuator has done, and asks the policy if nothing is under way. Mutates.

        Does nothing before the next tick is due. `snapshots` are the latest of all instances, however old.
        """
        if now < self._due:
            return
        self._due = now + self.interval
        busy = self._actuator.busy  # asked first: when it is not, all outcomes are there
        self._take_outcomes(now, busy)
        seen = [s.observe(snapshot.at(now)) for s, snapshot in zip(self._smoothers, snapshots, strict=True)]
        if now >= self._sample_due:
            self._sample_due = now + HISTORY_INTERVAL
            self.history.append(sample(now, self.plan, seen, self._resources))
        if not busy and now >= self.failures.until:
            self._decide(now, seen)

    # -- decisions

    def _decide(self, now: float, snapshots: Sequence[Snapshot]) -> None:
        """Asks the policy, and starts what it wants. A policy that raises is as one whose plan does not fit.

        Its state follows when all has been carried out: a decision that came to nothing has not been made.
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
        self._pending, self._decided = list(transitions), proposal.state
        self._open = self._decision(now, reason, self._target, "started", tuple(map(str, transitions)))
        self._record(self._open)
        self._actuator.start(transitions)

    def _take_outcomes(self, now: float, busy: bool) -> None:
        """The plan in force follows what has been committed."""
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
                    self._state = self._decided
                    self.failures = Failures()
        if self._pending and not busy:
            self._end(f"failed: {self._pending[0]} was dropped")
            self._fail(now)

    def _end(self, outcome: str) -> None:
        """The decision under way has ended. Others may be behind it in the log: the operators'."""
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
