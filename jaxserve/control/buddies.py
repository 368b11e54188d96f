"""Buddies: the devices that instances may merge on, so that few placements are ever needed.

Instances of the start, in order, are merged in pairs, pairs of pairs, and so on. Each of these groups has one order of
its devices, however it came about: step by step or at once.
"""

from collections.abc import Sequence

from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.regroup import merged_devices, merged_plan


def buddy_groups(start: Plan, max_tp: int) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Return by degree the devices of each instance that there may be: those of the start, and merged ones.

    Only instances of the start with one stage and the same degree merge. Each degree is twice the one before, up to
    `max_tp`. A group without a buddy stays as it is.
    """
    groups = [instance.stages[0].devices for instance in start.instances if len(instance.stages) == 1]
    degrees = {len(devices) for devices in groups}
    if len(degrees) != 1:
        return {}
    (degree,) = degrees
    found = {degree: tuple(groups)}
    while 2 * degree <= max_tp and len(groups) > 1:
        groups = [merged_devices(pair) for pair in zip(groups[::2], groups[1::2], strict=False)]
        degree *= 2
        found[degree] = tuple(groups)
    return found


def in_buddy_order(members: Sequence[InstancePlan], devices: Sequence[int]) -> list[InstancePlan]:
    """Return members in the order in which their merge has its devices in this order."""
    return sorted(members, key=lambda member: devices.index(member.stages[0].devices[0]))


def placements_of(start: Plan, max_tp: int) -> tuple[InstancePlan, ...]:
    """Return plans of all merged instances that there may be, smaller ones first, in the precisions of the start."""
    by_device = {instance.stages[0].devices: instance for instance in start.instances}
    merged: list[InstancePlan] = []
    for degree, groups in buddy_groups(start, max_tp).items():
        for devices in groups:
            if devices in by_device:
                continue
            members = [plan for plan in by_device.values() if plan.devices <= set(devices) and plan.tp == degree // 2]
            plan = merged_plan(in_buddy_order(members, devices), f"of devices {' '.join(map(str, devices))}")
            by_device[devices] = plan
            merged.append(plan)
    return tuple(merged)
