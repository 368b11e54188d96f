"""Regroup: the one change of the set of instances, told apart by its two sides alone.

Instances that merge, split, begin or end are all one transition: those named on its left side end, and those on its
right side begin. What moves between devices follows from the two sides (`control.movement`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from jaxserve.control.diff import diff
from jaxserve.control.lane_moves import lane_moves, left_over, reverse
from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.resources import Resources
from jaxserve.core.errors import PlanError


class Kind(Enum):
    """The ways in which KV pages get from one side of a regroup to the other."""

    MERGE = "merge"  # in place: every device keeps a part of the heads, of the pages of all members
    SPLIT = "split"  # in place, the reverse of a merge
    DROP = "drop"  # in place: every device keeps a part of the layers, and the pages of all members for these
    RESTORE = "restore"  # in place, the reverse of a drop
    COPY = "copy"  # page by page to other devices
    RECOVER = "recover"  # not at all: an instance that ends has failed, and all KV is computed again

    @property
    def joins(self) -> bool:
        """True if several instances become one, on all of their devices."""
        return self in (Kind.MERGE, Kind.DROP)

    @property
    def parts(self) -> bool:
        """True if one instance becomes several, on its devices."""
        return self in (Kind.SPLIT, Kind.RESTORE)


@dataclass(frozen=True)
class Regroup:
    """The end of some instances and the begin of others, between the same two steps."""

    before: tuple[str, ...]  # names
    after: tuple[InstancePlan, ...]
    recovers: bool = False  # those that end have failed: nothing of them moves but their requests

    def __str__(self) -> str:
        after = " and ".join(f"{plan.name} ({_where(plan)})" for plan in self.after)
        before = " and ".join(self.before)
        if not self.before:
            return f"add instance {after}"
        if not self.after:
            return f"remove instance {before}"
        return f"instance {before} -> {after}"


@dataclass(frozen=True)
class StructuralChange:
    """The way from a plan to one with other instances.

    First the instances that end get what they must have in common, then the regroups are carried out, and at last the
    new instances get what they could not have before.
    """

    align: Mapping[str, InstancePlan]  # name of an instance of the old plan -> its plan before the regroups
    regroups: tuple[Regroup, ...]
    finish: Mapping[str, InstancePlan]  # name of an instance of the new plan -> its plan after the regroups


def kind_of(before: Sequence[InstancePlan], after: Sequence[InstancePlan]) -> Kind:
    """Return how KV pages move from instances to those that take their devices."""
    if len(after) == 1 and len(before) > 1 and _is_merge(before, after[0]):
        return Kind.MERGE
    if len(before) == 1 and len(after) > 1 and _is_merge(after, before[0]):
        return Kind.SPLIT
    if len(after) == 1 and len(before) > 1 and is_group(before, after[0]):
        return Kind.DROP
    if len(before) == 1 and len(after) > 1 and is_group(after, before[0]) and all(plan.lanes == 1 for plan in after):
        return Kind.RESTORE
    return Kind.COPY


def merged_devices(members: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the devices of a merged stage, from those of the members' stages, which are equally many.

    Each device then holds a part of the heads and weights that it held before, and nothing of the weights has to move.
    """
    return tuple(device for devices in zip(*members, strict=True) for device in devices)


def merged_plan(members: Sequence[InstancePlan], name: str) -> InstancePlan:
    """Return the plan of the instance that equal instances become, with all of their KV pages."""
    first = members[0]
    stages = tuple(
        replace(stage, devices=merged_devices([member.stages[index].devices for member in members]))
        for index, stage in enumerate(first.stages)
    )
    limit = None if first.max_num_seqs is None else len(members) * first.max_num_seqs
    merged = InstancePlan(stages, name, limit)
    return merged.with_kv_pages(len(members) * first.kv_pages)


def split_plans(whole: InstancePlan, names: Sequence[str]) -> tuple[InstancePlan, ...]:
    """Return the plans of the instances that an instance becomes: the reverse of `merged_plan`.

    Raise `PlanError` if the devices or KV pages of a stage cannot be divided among so many.
    """
    count = len(names)
    for stage in whole.stages:
        if stage.tp % count or stage.kv_pages % count:
            raise PlanError(
                f"instance {whole.name} has stages of {stage.tp} devices and {stage.kv_pages} KV pages: "
                f"these cannot be divided among {count} instances"
            )
    limit = None if whole.max_num_seqs is None else max(1, whole.max_num_seqs // count)
    return tuple(
        InstancePlan(
            tuple(
                replace(stage, devices=stage.devices[index::count], kv_pages=stage.kv_pages // count)
                for stage in whole.stages
            ),
            name,
            limit,
        )
        for index, name in enumerate(names)
    )


def new_names(plan: Plan, count: int, used: Iterable[str] = ()) -> tuple[str, ...]:
    """Return names for further instances: numbers above all those of the plan's instances and of `used`."""
    numbers = [int(name) for name in (*(instance.name for instance in plan.instances), *used) if name.isdecimal()]
    first = max(numbers, default=-1) + 1
    return tuple(str(first + index) for index in range(count))


def has_same_instances(old: Plan, new: Plan) -> bool:
    """Return whether two plans have instances of the same names on the same devices."""
    there = {instance.name: instance for instance in new.instances}
    return len(there) == len(old.instances) == len(new.instances) and all(
        instance.name in there and instance.same_place(there[instance.name]) for instance in old.instances
    )


def structural_change(old: Plan, new: Plan, resources: Resources) -> StructuralChange:
    """Return the way from a plan to one with other instances.

    Raise `PlanError` if two instances of the new plan have one name or one device, if one has other blocks than the
    model or an impossible degree, or if an instance differs in what nothing changes.
    """
    _check_names_and_devices(new)
    for instance in new.instances:
        _check_shape(instance, old, resources)
    align: dict[str, InstancePlan] = {}
    finish: dict[str, InstancePlan] = {}
    regroups: list[Regroup] = []
    new_by_name = {instance.name: instance for instance in new.instances}
    for instance in old.instances:
        wanted = new_by_name.get(instance.name)
        if wanted is not None and instance.same_place(wanted) and wanted != instance:
            diff(instance, wanted, resources)  # raises
            finish[instance.name] = wanted
    for before, after in _groups(old, new):
        _check_lanes(before, after)
        started, moved = _aligned(before, after, resources)
        align |= {plan.name: plan for plan, now in zip(started, before, strict=True) if plan != now}
        finish |= {wanted.name: wanted for plan, wanted in zip(moved, after, strict=True) if plan != wanted}
        regroups.append(Regroup(tuple(plan.name for plan in before), moved))
    # Devices become free before they are needed.
    regroups.sort(key=lambda regroup: (bool(regroup.after), not regroup.before))
    return StructuralChange(align, tuple(regroups), finish)


def _groups(old: Plan, new: Plan) -> Iterator[tuple[tuple[InstancePlan, ...], tuple[InstancePlan, ...]]]:
    """Yield the instances that end and those that begin, together if they share devices."""
    kept = {
        instance.name
        for instance in old.instances
        if any(instance.name == other.name and instance.same_place(other) for other in new.instances)
    }
    ending = [instance for instance in old.instances if instance.name not in kept]
    beginning = [instance for instance in new.instances if instance.name not in kept]
    while ending or beginning:
        before: list[InstancePlan] = []
        after: list[InstancePlan] = []
        devices = set((ending or beginning)[0].devices)
        grown = True
        while grown:
            grown = False
            for remaining, group in ((ending, before), (beginning, after)):
                for instance in [instance for instance in remaining if instance.devices & devices]:
                    remaining.remove(instance)
                    group.append(instance)
                    devices |= instance.devices
                    grown = True
        yield _in_member_order(tuple(before), tuple(after))


def _in_member_order(
    before: tuple[InstancePlan, ...], after: tuple[InstancePlan, ...]
) -> tuple[tuple[InstancePlan, ...], tuple[InstancePlan, ...]]:
    """Return the members of a merge or a split in the order in which the other side lists their devices."""

    def by_device_of(whole: InstancePlan) -> Callable[[InstancePlan], tuple[int, ...]]:
        places = {device: place for stage in whole.stages for place, device in enumerate(stage.devices)}
        return lambda member: tuple(places.get(device, -1) for device in member.stages[0].devices)

    if len(after) == 1:
        before = tuple(sorted(before, key=by_device_of(after[0])))
    elif len(before) == 1:
        after = tuple(sorted(after, key=by_device_of(before[0])))
    return before, after


def _aligned(
    before: Sequence[InstancePlan], after: Sequence[InstancePlan], resources: Resources
) -> tuple[tuple[InstancePlan, ...], tuple[InstancePlan, ...]]:
    """Return the plans that instances must have right before a regroup, and those that the new ones have right after.

    Members of a merge or a split have the same precisions and KV pages.
    """
    kind = kind_of(before, after)
    if kind is Kind.COPY:
        return tuple(before), tuple(after)
    if kind is Kind.DROP:
        return _aligned_for_drop(before, after[0], resources)
    if kind is Kind.RESTORE:
        return _aligned_for_restore(before[0], after, resources)
    if kind is Kind.MERGE:
        (whole,), count = after, len(before)
        pages = min(min(plan.kv_pages for plan in before), whole.kv_pages // count)
        members = tuple(_with(plan, whole.precisions, pages) for plan in before)
        return members, (whole.with_kv_pages(pages * count),)
    (whole,), count = before, len(after)
    pages = min(min(plan.kv_pages for plan in after), whole.kv_pages // count)
    precisions = after[0].precisions
    return (_with(whole, precisions, pages * count),), tuple(_with(plan, precisions, pages) for plan in after)


def _aligned_for_drop(
    members: Sequence[InstancePlan], whole: InstancePlan, resources: Resources
) -> tuple[tuple[InstancePlan, ...], tuple[InstancePlan, ...]]:
    """Return the plans of members right before a drop, and that of the group right after it.

    No member has more rows of pages than the group can hold. Every device keeps the layers that it has, in their
    precisions, and all that fits of the wanted pages is there at once.
    """
    lanes, largest = whole.lanes, max(members, key=lambda plan: plan.kv_pages // plan.lanes)
    there = {
        (stage.devices, block.block): block.precision
        for plan in members
        for stage in plan.stages
        for block in stage.blocks
    }
    moved = whole.with_precisions(
        {block.block: there[stage.devices, block.block] for stage in whole.stages for block in stage.blocks}
    )
    moves = lane_moves(members, moved)
    left = max(left_over(moves, largest, resources).values(), default=0)
    fitting = replace(resources, budget=resources.budget - left).kv_capacity(moved) // lanes
    rows = min(whole.kv_pages // lanes, fitting)
    aligned = tuple(plan.with_kv_pages(min(plan.kv_pages, rows * plan.lanes)) for plan in members)
    return aligned, (moved.with_kv_pages(rows * lanes),)


def _aligned_for_restore(
    whole: InstancePlan, members: Sequence[InstancePlan], resources: Resources
) -> tuple[tuple[InstancePlan, ...], tuple[InstancePlan, ...]]:
    """Return the plan of a group right before its layers are restored, and those of its members right after it."""
    there = {(stage.devices, block.block): block.precision for stage in whole.stages for block in stage.blocks}
    moved = tuple(
        plan.with_precisions(
            {
                block.block: there.get((stage.devices, block.block), block.precision)
                for stage in plan.stages
                for block in stage.blocks
            }
        )
        for plan in members
    )
    pages = min(min(plan.kv_pages for plan in members), whole.kv_pages // whole.lanes)
    moves = reverse(lane_moves(moved, whole))
    if left := max(left_over(moves, moved[0].with_kv_pages(pages), resources).values(), default=0):
        room = replace(resources, budget=resources.budget - left)
        pages = min(pages, *map(room.kv_capacity, moved))
    return (whole.with_kv_pages(pages * whole.lanes),), tuple(plan.with_kv_pages(pages) for plan in moved)


def _with(plan: InstancePlan, precisions: Mapping[str, str], pages: int) -> InstancePlan:
    return plan.with_precisions(precisions).with_kv_pages(pages)


def _is_merge(members: Sequence[InstancePlan], whole: InstancePlan) -> bool:
    """Return whether the devices of an instance are those of its members, in the order of `merged_devices`."""
    if any(len(member.stages) != len(whole.stages) for member in members):
        return False
    for index, stage in enumerate(whole.stages):
        own = [member.stages[index] for member in members]
        blocks = [block.block for block in stage.blocks]
        if len({part.tp for part in own}) > 1 or any([block.block for block in part.blocks] != blocks for part in own):
            return False
        if merged_devices([part.devices for part in own]) != stage.devices:
            return False
    return True


def is_group(members: Sequence[InstancePlan], whole: InstancePlan) -> bool:
    """Return whether each stage of an instance has the devices of one stage of its members, and some of its blocks."""
    own = {stage.devices: {block.block for block in stage.blocks} for plan in members for stage in plan.stages}
    return (
        whole.lanes == sum(plan.lanes for plan in members)
        and len(whole.stages) == len(own) == sum(len(plan.stages) for plan in members)
        and all({block.block for block in stage.blocks} <= own.get(stage.devices, set()) for stage in whole.stages)
    )


def _check_names_and_devices(plan: Plan) -> None:
    names = [instance.name for instance in plan.instances]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(f"the plan names an instance twice: {name}")
    owners: dict[int, str] = {}
    for instance in plan.instances:
        for device in instance.devices:
            other = owners.setdefault(device, instance.name)
            if other != instance.name:
                raise PlanError(f"instances {other} and {instance.name} are both on device {device}")
        for index, stage in enumerate(instance.stages):
            if len(set(stage.devices)) < len(stage.devices):
                raise PlanError(f"instance {instance.name}, stage {index} names a device twice")


def _check_lanes(before: Sequence[InstancePlan], after: Sequence[InstancePlan]) -> None:
    if kind_of(before, after) is not Kind.COPY:
        return
    for plan in after:
        if plan.lanes > 1:
            raise PlanError(
                f"instance {plan.name} has {plan.lanes} lanes: it must have the devices of the instances that it comes "
                "from as stages, each with a part of the layers that it has"
            )


def _check_shape(instance: InstancePlan, old: Plan, resources: Resources) -> None:
    """Check that an instance has the model's blocks, on a number of devices that the model was padded for."""
    blocks = [block.block for block in old.instances[0].blocks]
    if [block.block for block in instance.blocks] != blocks:
        raise PlanError(f"instance {instance.name} must have the blocks {blocks[0]} to {blocks[-1]}, in this order")
    degrees = {stage.tp for present in old.instances for stage in present.stages}
    for index, stage in enumerate(instance.stages):
        if resources.devices and not resources.degrees and stage.tp not in degrees:
            raise PlanError(
                f"instance {instance.name}, stage {index} has {stage.tp} devices: it must have "
                f"{_words(sorted(degrees))} (tp, max_tp)"
            )


def _where(plan: InstancePlan) -> str:
    return f"{'stages on ' if len(plan.stages) > 1 else ''}devices {_words(_ordered(plan))}"


def _ordered(plan: InstancePlan) -> list[int]:
    return [device for stage in plan.stages for device in stage.devices]


def _words(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
