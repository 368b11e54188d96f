"""What instances can hold of one request: now, for the router, and under the best plan that may come into force."""

from collections.abc import Callable

from jaxserve.control.plan import PlanInForce
from jaxserve.control.policy import StructuralPolicy
from jaxserve.control.resources import Resources
from jaxserve.scheduler.routing import Route


class ServiceLimits:
    """The limits of a service whose instances change. Its methods may be called from any thread."""

    def __init__(self, in_force: PlanInForce, resources: Resources, policy: Callable[[], object]):
        """`policy` returns the policy that decides; None if there is none."""
        self._in_force, self._resources, self._policy = in_force, resources, policy

    def route(self, name: str) -> Route | None:
        """Return the route to an instance; None if it is not in the plan in force."""
        plan = next((plan for plan in self._in_force.plan.instances if plan.name == name), None)
        if plan is None:
            return None
        return Route(name, self._max_len(self._in_force.holds_as(name)), len(plan.devices), plan.draining)

    def max_model_len(self) -> int:
        """Return the tokens of the longest request that the service can hold, perhaps under another plan."""
        plan, policy = self._in_force.plan, self._policy()
        degrees = {instance.tp for instance in plan.instances}
        if isinstance(policy, StructuralPolicy):
            degrees.add(policy.largest_tp(plan))
        return max(map(self._max_len, degrees))

    def _max_len(self, degree: int) -> int:
        return self._resources.limits_of(degree).max_len
