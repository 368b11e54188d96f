"""How many tokens the KV pages of instances hold, and how far they can still grow under a policy."""

import logging
from dataclasses import replace

from jaxserve.control.controller import home
from jaxserve.control.diff import diff
from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.policy import BoundedPolicy, Policy
from jaxserve.control.resources import Resources
from jaxserve.control.transitions import ResizeKVPool, SwapPrecision
from jaxserve.telemetry import KVCapacity

log = logging.getLogger(__name__)


class KVHeadroom:
    """The KV capacities of instances under the policy in force. They are computed again only when plans have changed.

    Sizes and times are those of the transitions that would be carried out. What a policy that is no `BoundedPolicy`
    wants is unknown: for these, all layers take the precisions of which the server holds the smallest variants.
    """

    def __init__(self, resources: Resources, start: Plan):
        """`start` is the plan that the engine was started with."""
        self._resources, self._start = resources, start
        self._known: dict[str, tuple[Policy, InstancePlan, KVCapacity]] = {}  # by the instance's name

    def of(self, policy: Policy, plan: Plan) -> dict[str, KVCapacity]:
        """Return the capacity of each instance of the plan in force, by its name."""
        return {instance.name: self._known_or_new(policy, instance) for instance in plan.instances}

    def _known_or_new(self, policy: Policy, plan: InstancePlan) -> KVCapacity:
        known = self._known.get(plan.name)
        if known is None or known[0] is not policy or known[1] is not plan:
            known = self._known[plan.name] = policy, plan, self._capacity(policy, plan)
        return known[2]

    def _capacity(self, policy: Policy, plan: InstancePlan) -> KVCapacity:
        present = KVCapacity(self._tokens(plan), self._tokens(plan), 0.0)
        try:
            largest = self._largest(policy, plan)
            if largest is None or largest.kv_pages <= plan.kv_pages:
                return present
            changes = diff(plan, largest, self._resources)
            seconds = sum(change.seconds for change in changes if isinstance(change, SwapPrecision | ResizeKVPool))
        except Exception:  # of a user's policy
            log.exception("policy %s: the largest plan of instance %s is unknown", policy.name, plan.name)
            return present
        return replace(present, max_tokens=self._tokens(largest), max_seconds=seconds)

    def _largest(self, policy: Policy, plan: InstancePlan) -> InstancePlan | None:
        if isinstance(policy, BoundedPolicy):
            return policy.largest(home(plan, self._start, self._resources))
        smallest = self._resources.smallest(plan)
        return smallest.with_kv_pages(self._resources.kv_capacity(smallest))

    def _tokens(self, plan: InstancePlan) -> int:
        return (plan.kv_pages - 1) * self._resources.page_size  # without the null page
