"""The actuator of regroups in virtual time, which drives the procedure of `control.regrouping`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxserve.control.plan import InstancePlan
from jaxserve.control.regroup import Regroup
from jaxserve.control.regrouping import Regrouping
from jaxserve.control.transitions import Beside, BetweenStepsOf, EachBetweenSteps, Outcome, Rendezvous
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
        self._driver = self._new_driver()
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
    def exchanging(self) -> frozenset[str]:
        return self._regrouping.exchanging

    @property
    def failed(self) -> Mapping[str, BaseException]:
        return self._host.failed

    def give_up(self, name: str) -> None:
        pass

    def _new_driver(self) -> ProcedureDriver:
        driver = ProcedureDriver(self._clock, self._agenda, SharedLinks({}), lambda wait: self._wait(driver, wait))
        return driver

    def _wait(self, driver: ProcedureDriver, wait: Rendezvous | BetweenStepsOf | EachBetweenSteps | Beside) -> None:
        match wait:
            case BetweenStepsOf():
                self._front.instances[wait.instance].call(partial(self._run_between, driver, wait))
            case EachBetweenSteps():
                self._wait_for_each(driver, wait.functions)
            case Beside():
                self._new_driver().start(wait.procedure)
                driver.soon(None)
            case Rendezvous():
                commit = partial(self._commit, driver, wait)
                self._front.stop(wait.instances, lambda: self._agenda.add(self._clock.now(), commit))

    def _wait_for_each(self, driver: ProcedureDriver, functions: Mapping[str, Callable[[], None]]) -> None:
        """Run functions, each between two steps of its instance."""
        waiting, errors = set(functions), list[Exception]()

        def run(name: str) -> None:
            try:
                functions[name]()
            except Exception as error:
                errors.append(error)
            waiting.remove(name)
            if not waiting:
                driver.soon(None, errors[0] if errors else None)

        for name in functions:
            self._front.instances[name].call(partial(run, name))

    def _run_between(self, driver: ProcedureDriver, wait: BetweenStepsOf) -> None:
        """Run the function of a wait between two steps, of which the devices have others to compute meanwhile."""
        try:
            wait.function()
        except Exception as error:
            self._host.take_pause()
            driver.soon(None, error)
            return
        instance, (seconds, link_bytes) = self._front.instances[wait.instance], self._host.take_pause()
        if seconds:
            self.pauses.append(Pause(self._clock.now(), (wait.instance,), seconds, link_bytes))
            instance.occupy(seconds)
        fence = Fence()
        instance.after_dispatched(fence.passes)
        driver.soon(fence)

    def _commit(self, driver: ProcedureDriver, wait: Rendezvous) -> None:
        """Run the function of a wait whose instances have stopped, and let them go on when its time is over."""
        now = self._clock.now()
        try:
            wait.function()
        except Exception as error:
            self._host.take_pause()
            self._go_on(driver, None, error)
            return
        seconds, link_bytes = self._host.take_pause()
        pause = Pause(now, wait.instances, seconds + self._host_seconds, link_bytes)
        self.pauses.append(pause)
        fence = Fence()
        fence.passes()
        self._agenda.add(now + pause.seconds, partial(self._go_on, driver, fence))

    def _go_on(self, driver: ProcedureDriver, value: Any, error: Exception | None = None) -> None:
        self._front.go_on()
        driver.soon(value, error)
