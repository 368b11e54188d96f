"""The actuator of regroups in virtual time, which drives the procedure of `control.regrouping`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxserve.control.plan import InstancePlan
from jaxserve.control.regroup import Regroup
from jaxserve.control.regrouping import Regrouping
from jaxserve.control.transitions import BetweenStepsOf, Outcome, Rendezvous
from jaxserve.core.clock import Clock
from jaxserve.sim.actuator import report_to
from jaxserve.sim.driver import Agenda, Fence, ProcedureDriver
from jaxserve.sim.front import SimFront
from jaxserve.sim.host import SimHost
from jaxserve.sim.links import SharedLinks


@dataclass(frozen=True)
class Pause:
    """For how long a regroup has kept its instances from computing, from the end of their last step on."""

    time: float  # s, of its begin
    instances: tuple[str, ...]
    seconds: float
    link_bytes: int  # that have crossed links between devices


class SimRegroupActuator:
    """An actuator (`control.structure.RegroupActuator`) of all simulated instances."""

    def __init__(
        self,
        regrouping: Regrouping,
        host: SimHost,
        front: SimFront,
        clock: Clock,
        agenda: Agenda,
        *,
        host_seconds: float = 0.0,
    ):
        """Instances are stopped for `host_seconds` longer than moving bytes takes: for the host's own work."""
        self._regrouping, self._host, self._front = regrouping, host, front
        self._clock, self._agenda, self._host_seconds = clock, agenda, host_seconds
        self._driver = ProcedureDriver(clock, agenda, SharedLinks({}), self._wait)
        self._new_outcomes: list[Outcome] = []
        self.outcomes: list[Outcome] = []
        """The outcomes of all regroups that were polled."""
        self.pauses: list[Pause] = []
        """The pauses of all regroups that are in force."""

    @property
    def busy(self) -> bool:
        return self._driver.busy

    def start(self, regroups: Sequence[Regroup]) -> None:
        self._driver.start(self._regrouping.carry_out(tuple(regroups), partial(report_to, self._new_outcomes)))

    def poll(self) -> Sequence[Outcome]:
        outcomes, self._new_outcomes[:] = list(self._new_outcomes), []
        self.outcomes += outcomes
        return outcomes

    def is_warm(self, plan: InstancePlan) -> bool:
        return True

    @property
    def failed(self) -> Mapping[str, BaseException]:
        return self._host.failed

    def give_up(self, name: str) -> None:
        pass

    def _wait(self, wait: Rendezvous | BetweenStepsOf) -> None:
        if isinstance(wait, BetweenStepsOf):
            self._front.instances[wait.instance].call(partial(self._run_between, wait))
            return
        names = wait.instances
        self._front.stop(names, lambda: self._agenda.add(self._clock.now(), partial(self._commit, wait, names)))

    def _run_between(self, wait: BetweenStepsOf) -> None:
        """Run the function of a wait between two steps, of which the devices have others to compute meanwhile."""
        try:
            wait.function()
        except Exception as error:
            self._host.take_pause()
            self._driver.soon(None, error)
            return
        instance, (seconds, link_bytes) = self._front.instances[wait.instance], self._host.take_pause()
        if seconds:
            self.pauses.append(Pause(self._clock.now(), (wait.instance,), seconds, link_bytes))
            instance.occupy(seconds)
        fence = Fence()
        instance.after_dispatched(fence.passes)
        self._driver.soon(fence)

    def _commit(self, wait: Rendezvous, names: Sequence[str]) -> None:
        """Run the function of a wait whose instances have stopped, and let them go on when its time is over."""
        now = self._clock.now()
        try:
            wait.function()
        except Exception as error:
            self._host.take_pause()
            self._go_on(None, error)
            return
        seconds, link_bytes = self._host.take_pause()
        pause = Pause(now, tuple(names), seconds + self._host_seconds, link_bytes)
        self.pauses.append(pause)
        fence = Fence()
        fence.passes()
        self._agenda.add(now + pause.seconds, partial(self._go_on, fence))

    def _go_on(self, value: Any, error: Exception | None = None) -> None:
        self._front.go_on()
        self._driver.soon(value, error)
