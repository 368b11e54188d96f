"""The actuator of regroups on real devices: a thread that drives the procedure of `control.regrouping`."""

import queue
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxserve.actuator.actuator import between_steps, each_between_steps, report_to
from jaxserve.actuator.procedure_thread import ProcedureThread
from jaxserve.control.plan import InstancePlan
from jaxserve.control.reconfigure import Cancelled
from jaxserve.control.regroup import Regroup
from jaxserve.control.regrouping import Regrouping
from jaxserve.control.transitions import (
    Beside,
    BetweenStepsOf,
    EachBetweenSteps,
    Outcome,
    Rendezvous,
    StepsEnded,
    Waits,
)
from jaxserve.core.errors import EngineStopped
from jaxserve.engine.instances import InstanceSet
from jaxserve.telemetry import EngineMetrics


class DeviceRegroupActuator:
    """An actuator (`control.structure.RegroupActuator`) of all instances, with a thread of its own."""

    def __init__(
        self,
        regrouping: Regrouping,
        front: Callable[[], InstanceSet],
        metrics: EngineMetrics,
        is_warm: Callable[[InstancePlan], bool],
    ):
        """`front` returns the engine's front, which stops instances for a rendezvous."""
        self._regrouping, self._front, self._metrics, self._is_warm = regrouping, front, metrics, is_warm
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._thread = self._new_thread()
        self._beside: list[ProcedureThread] = []  # of procedures that go on after their regroup, until they are closed

    @property
    def busy(self) -> bool:
        return self._thread.busy

    def start(self, regroups: Sequence[Regroup]) -> None:
        report = partial(report_to, self._metrics, self._outcomes)
        self._thread.start(self._regrouping.carry_out(tuple(regroups), report))

    def poll(self) -> Sequence[Outcome]:
        outcomes = []
        while not self._outcomes.empty():
            outcomes.append(self._outcomes.get())
        return outcomes

    def is_warm(self, plan: InstancePlan) -> bool:
        return self._is_warm(plan)

    @property
    def exchanging(self) -> frozenset[str]:
        return self._regrouping.exchanging

    @property
    def failed(self) -> Mapping[str, BaseException]:
        return self._regrouping.host.failed

    def give_up(self, name: str) -> None:
        self._front().give_up(name)

    def close(self) -> None:
        """End the threads, and drop regroups that have not ended. May be called several times."""
        self._thread.close()
        for thread in self._beside:  # to which no other thread adds any more
            thread.close()

    def _new_thread(self) -> ProcedureThread:
        thread = ProcedureThread("jaxserve-regroup", lambda wait: self._wait(thread, wait))
        return thread

    def _start_beside(self, procedure: Waits[None]) -> None:
        for thread in [thread for thread in self._beside if not thread.busy]:
            thread.close()
            self._beside.remove(thread)
        self._beside.append(self._new_thread())
        self._beside[-1].start(procedure)

    def _wait(
        self, thread: ProcedureThread, wait: Rendezvous | BetweenStepsOf | EachBetweenSteps | StepsEnded | Beside
    ) -> Any:
        front = self._front()
        match wait:
            case BetweenStepsOf():
                return between_steps(front.loops[wait.instance], wait.function, thread)
            case EachBetweenSteps():
                loops = front.loops
                return each_between_steps([(loops[name], call) for name, call in wait.functions.items()], thread)
            case StepsEnded():
                return thread.result(wait.fence)
            case Beside():
                return self._start_beside(wait.procedure)
        try:
            with front.stopped(wait.instances):
                wait.function()
        except EngineStopped as error:
            raise Cancelled(str(error)) from None
        return None
