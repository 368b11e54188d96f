"""How long steps take: what an instance in virtual time has to know."""

from typing import Protocol

from jaxserve.control.plan import InstancePlan
from jaxserve.sim.step_time import StepLoad


class StepSeconds(Protocol):
    """Of the steps of one instance under one plan."""

    @property
    def per_context(self) -> float | None:
        """Seconds by which a step is longer for each token more that its decodes attend to; None if that is no
        constant, and steps are to be asked for one by one.
        """
        ...

    def seconds(self, load: StepLoad) -> float:
        """On the device, from the end of the step before, or from its own dispatch."""
        ...


class Timing(Protocol):
    """Of any plan."""

    @property
    def host(self) -> float:
        """Seconds from a step's begin to its dispatch, and to the next begin, while the device has nothing to do."""
        ...

    def of(self, instance: InstancePlan) -> StepSeconds: ...
