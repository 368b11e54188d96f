"""What the control plane tells the step log: what it saw at each tick, what it decided, and how transitions ended."""

from collections.abc import Sequence
from typing import Any

from jaxserve.control.actuation import Actuator, Outcome
from jaxserve.control.controller import Controller
from jaxserve.control.plan import Plan
from jaxserve.control.policy import Policy
from jaxserve.control.resources import Resources
from jaxserve.control.transitions import Transition
from jaxserve.engine.step_log import Decided, StepLog, Tick
from jaxserve.telemetry import Snapshot


class LoggedActuator:
    """An `Actuator` that is another one, and remembers what its controller learnt of it in a tick."""

    def __init__(self, actuator: Actuator):
        self._actuator = actuator
        self.was_busy = False
        self.outcomes: list[Outcome] = []

    @property
    def busy(self) -> bool:
        self.was_busy = self._actuator.busy
        return self.was_busy

    def start(self, transitions: Sequence[Transition]) -> None:
        self._actuator.start(transitions)

    def poll(self) -> Sequence[Outcome]:
        outcomes = self._actuator.poll()
        self.outcomes += outcomes
        return outcomes


class LoggedController(Controller):
    """A controller whose ticks and decisions are logged."""

    def __init__(
        self, log: StepLog, plan: Plan, policy: Policy, resources: Resources, actuator: Actuator, **timing: Any
    ):
        """As `Controller`, with the log first."""
        self._log, self._logged = log, LoggedActuator(actuator)
        super().__init__(plan, policy, resources, self._logged, **timing)

    def tick(self, now: float, snapshots: Sequence[Snapshot]) -> None:
        if now < self._due:
            return
        super().tick(now, snapshots)
        seen = [(snapshot.time, snapshot.plan_version) for snapshot in snapshots]
        outcomes = [(outcome.error, outcome.seconds) for outcome in self._logged.outcomes]
        self._logged.outcomes.clear()
        self._log.write(Tick(now, self._logged.was_busy, seen, outcomes))
        if (decided := decided_at(self, now)) is not None:
            self._log.write(decided)


def decided_at(controller: Controller, now: float) -> Decided | None:
    """What a controller has decided at the tick at `now`, which was its latest one.

    Nothing if the latest entry is done: that is an operator's, as no decision is within its own tick.
    """
    if not controller.decisions or (d := controller.decisions[-1]).time != now or d.outcome == "done":
        return None
    return Decided(now, d.policy, d.reason, d.before_version, d.target_version, d.transitions, d.outcome)
