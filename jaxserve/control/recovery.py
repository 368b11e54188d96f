"""Recovery: the regroup by which the requests of an instance that has failed go on.

The members of a group that have lost no device get all layers again (KunServe, section 4.4). The requests of an
instance that was alone go to the others. A device that has failed is in no instance afterwards.
"""

from collections.abc import Collection

from jaxserve.control.groups import restored_plans
from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.regroup import Regroup, new_names
from jaxserve.control.resources import Resources
from jaxserve.core.errors import PlanError, StageFailed


def recovery(
    plan: Plan, name: str, error: BaseException, start: Plan, resources: Resources, used_names: Collection[str]
) -> Regroup:
    """Return the regroup after an instance has failed with an error. Raise `PlanError` if nothing is left of it."""
    whole = plan.instance(name)
    after: tuple[InstancePlan, ...] = ()
    if whole.lanes > 1:
        lost = lost_devices(whole, error)
        members = restored_plans(whole, new_names(plan, whole.lanes, used_names), start.instances[0])
        after = tuple(_with_most_pages(member, start, resources) for member in members if not member.devices & lost)
    if not after and len(plan.instances) == 1:
        raise PlanError(f"no device is left that could go on for instance {name}")
    return Regroup((name,), after, recovers=True)


def lost_devices(plan: InstancePlan, error: BaseException) -> frozenset[int]:
    """Return the devices of the stage at which an instance has failed; none if the host has."""
    return frozenset(plan.stages[error.stage].devices) if isinstance(error, StageFailed) else frozenset()


def _with_most_pages(member: InstancePlan, start: Plan, resources: Resources) -> InstancePlan:
    """Return a member's plan with as many KV pages as at the start, as far as they fit besides its layers."""
    return member.with_kv_pages(min(start.instances[0].kv_pages, resources.kv_capacity(member)))
