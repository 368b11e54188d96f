"""The actuator of regroups on real devices: a thread that drives the procedure of `control.regrouping`."""

import queue
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxserve.actuator.actuator import between_steps, report_to
from jaxserve.actuator.procedure_thread import ProcedureThread
from jaxserve.control.plan import InstancePlan
from jaxserve.control.reconfigure import Cancelled
from jaxserve.control.regroup import Regroup
from jaxserve.control.regrouping import Regrouping
from jaxserve.control.transitions import BetweenStepsOf, Outcome, Rendezvous, StepsEnded
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
        self._thread = ProcedureThread("jaxserve-regroup", self._wait)

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
    def failed(self) -> Mapping[str, BaseException]:
        return self._regrouping.host.failed

    def give_up(self, name: str) -> None:
        self._front().give_up(name)

    def close(self) -> None:
        """End the thread, and drop regroups that have not ended. May be called several times."""
        self._thread.close()

    def _wait(self, wait: Rendezvous | BetweenStepsOf | StepsEnded) -> Any:
        front = self._front()
        match wait:
            case BetweenStepsOf():
                return between_steps(front.loops[wait.instance], wait.function, self._thread)
            case StepsEnded():
                return self._thread.result(wait.fence)
        try:
            with front.stopped(wait.instances):
                wait.function()
        except EngineStopped as error:
            raise Cancelled(str(error)) from None
        return None
