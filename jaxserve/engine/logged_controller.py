"""A controller whose ticks, decisions and regroups are logged in a step log."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxserve.control.controller import Controller
from jaxserve.control.plan import InstancePlan, PlanInForce
from jaxserve.control.policy import Policy
from jaxserve.control.regroup import Regroup
from jaxserve.control.resources import Resources
from jaxserve.control.structure import RegroupActuator
from jaxserve.control.transitions import Actuator, Outcome, Transition
from jaxserve.engine.step_log import DecisionRecord, RegroupRecord, StepLog, Tick
from jaxserve.telemetry import Snapshot


class LoggedActuator:
    """An `Actuator` that wraps another one, and records what its controller reads from it during a tick."""

    def __init__(self, actuator: Actuator):
        self.wraps = actuator
        self.was_busy = False
        self.outcomes: list[Outcome] = []

    @property
    def busy(self) -> bool:
        self.was_busy = self.wraps.busy
        return self.was_busy

    def start(self, transitions: Sequence[Transition]) -> None:
        self.wraps.start(transitions)

    def poll(self) -> Sequence[Outcome]:
        outcomes = self.wraps.poll()
        self.outcomes += outcomes
        return outcomes


class _LoggedActuators(Mapping[str, LoggedActuator]):
    """The actuators of the instances that there are now, each in the wrapper that logs it."""

    def __init__(self, actuators: Mapping[str, Actuator]):
        self._actuators = actuators
        self._logged: dict[str, LoggedActuator] = {}

    def __getitem__(self, name: str) -> LoggedActuator:
        actuator, logged = self._actuators[name], self._logged.get(name)
        if logged is None or logged.wraps is not actuator:
            logged = self._logged[name] = LoggedActuator(actuator)
        return logged

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._actuators))

    def __len__(self) -> int:
        return len(self._actuators)


class _LoggedRegrouper:
    """A `RegroupActuator` that wraps another one, and keeps the outcomes that its controller reads during a tick."""

    def __init__(self, regrouper: RegroupActuator):
        self._regrouper = regrouper
        self.outcomes: list[Outcome] = []

    @property
    def busy(self) -> bool:
        return self._regrouper.busy

    def start(self, regroups: Sequence[Regroup]) -> None:
        self._regrouper.start(regroups)

    def poll(self) -> Sequence[Outcome]:
        outcomes = self._regrouper.poll()
        self.outcomes += outcomes
        return outcomes

    def is_warm(self, plan: InstancePlan) -> bool:
        return self._regrouper.is_warm(plan)

    @property
    def exchanging(self) -> frozenset[str]:
        return self._regrouper.exchanging

    @property
    def failed(self) -> Mapping[str, BaseException]:
        return self._regrouper.failed

    def give_up(self, name: str) -> None:
        self._regrouper.give_up(name)


class LoggedController(Controller):
    """A controller whose ticks and decisions are logged."""

    def __init__(
        self,
        log: StepLog,
        in_force: PlanInForce,
        policy: Policy,
        resources: Resources,
        actuators: Mapping[str, Actuator],
        *,
        regrouper: RegroupActuator | None = None,
        **timing: Any,
    ):
        """Make a `Controller` with the remaining arguments, which logs to `log`."""
        self._log, self._logged = log, _LoggedActuators(actuators)
        self._regroups = None if regrouper is None else _LoggedRegrouper(regrouper)
        super().__init__(in_force, policy, resources, self._logged, regrouper=self._regroups, **timing)

    def tick(self, now: float, snapshots: Mapping[str, Snapshot], *service: Any, **options: Any) -> None:
        if now < self._due:
            return
        super().tick(now, snapshots, *service, **options)
        logged = [self._logged[name] for name in snapshots if name in self._logged]
        seen = [(snapshot.time, snapshot.plan_version) for snapshot in snapshots.values()]
        outcomes = [(outcome.error, outcome.seconds) for actuator in logged for outcome in actuator.outcomes]
        for actuator in logged:
            actuator.outcomes.clear()
        self._log.write(Tick(now, any(actuator.was_busy for actuator in logged), seen, outcomes))
        self._log_regroups(now)
        if (decided := decision_record(self, now)) is not None:
            self._log.write(decided)

    def _log_regroups(self, now: float) -> None:
        if self._regroups is None:
            return
        for outcome in self._regroups.outcomes:
            regroup: Regroup = outcome.transition
            after = [
                (plan.name, [list(stage.devices) for stage in plan.stages], plan.kv_pages) for plan in regroup.after
            ]
            self._log.write(RegroupRecord(now, regroup.before, after, outcome.error, outcome.seconds))
        self._regroups.outcomes.clear()


def decision_record(controller: Controller, now: float) -> DecisionRecord | None:
    """Return the decision of a controller's latest tick, which was at time `now`, or None without a decision.

    A decision that is "done" at the time of its own tick is a change by an operator, and does not count.
    """
    latest = controller.latest_decisions(1)
    if not latest or (d := latest[0]).time != now or d.outcome == "done":
        return None
    return DecisionRecord(now, d.policy, d.reason, d.before_version, d.target_version, d.transitions, d.outcome)
