"""The control of one instance: its policy's state, the decision under way, and its failures."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.control.diff import diff
from jaxserve.control.plan import InstancePlan, PlanInForce
from jaxserve.control.policy import Policy, errors_of_policy
from jaxserve.control.record import Decision
from jaxserve.control.resources import Resources, validate_instance
from jaxserve.control.transitions import Actuator, Transition
from jaxserve.core.errors import PlanError
from jaxserve.telemetry import Smoother, Snapshot

log = logging.getLogger(__name__)


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
        self.actuator, self._smoother, self._backoff = actuator, smoother, backoff
        self.held = False  # whether the policy is not asked, because the set of instances is about to change
        self.error = ""  # why the latest plan of `carry_out` failed
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
        busy = self.actuator.busy
        if self._pending:
            with self._lock:
                self._take_outcomes(now, busy)
        self.seen = self._smoother.observe(snapshot, now)
        if not (busy or self.held) and now >= self.failures.until:
            self._decide(now)

    @property
    def settled(self) -> bool:
        """True if no transition is under way."""
        return not self._pending and not self.actuator.busy

    def carry_out(self, plan: InstancePlan) -> None:
        """Carry out a plan that is part of a change of several instances, while this one is held and settled.

        The outcome is in `error` once the instance is settled again. Raise `PlanError` if the plan cannot be reached.
        """
        transitions = diff(self._in_force.instance(self._start.name), plan, self._resources)
        self.error, self._state_when_done = "", self._state
        if transitions:
            self.target, self._pending = plan, list(transitions)
            self.actuator.start(transitions)

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
        self.actuator.start(transitions)

    def _take_outcomes(self, now: float, busy: bool) -> None:
        """End the decision under way after the last outcome or a failure."""
        for outcome in self.actuator.poll():
            transition = self._pending.pop(0)
            assert transition == outcome.transition, (transition, outcome)
            if outcome.error is not None:
                self._end(f"failed: {transition}: {outcome.error}", now)
            elif not self._pending:
                self._end("done", now)
        if self._pending and not busy:
            self._end(f"failed: {self._pending[0]} was dropped", now)

    def _end(self, outcome: str, now: float) -> None:
        """End what is under way: the policy's decision, or a plan of `carry_out`."""
        failed = outcome != "done"
        if self._open is None:
            self.error = outcome if failed else ""
        else:
            number, decision = self._open
            self._record(replace(decision, outcome=outcome), number)
            if failed:
                self._fail(now)
            else:
                self.failures = Failures()
        if not failed:
            self._state = self._state_when_done
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
