"""Changes of the set of instances by hand: functions from a plan to the plan that an operator wants.

They raise `PlanError` that says what is impossible and why. Whether the wanted plan fits is checked afterwards, as for
every plan.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from jaxserve.control.buddies import buddy_groups, in_buddy_order
from jaxserve.control.groups import grouped_plan, restored_plans
from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.regroup import merged_plan, new_names, split_plans
from jaxserve.control.resources import Resources
from jaxserve.core.errors import PlanError

MERGE, SPLIT, DROP, RESTORE = "merge", "split", "drop", "restore"
ADD, REMOVE, DRAIN, UNDRAIN = "add", "remove", "drain", "undrain"
ACTIONS = (MERGE, SPLIT, DROP, RESTORE, ADD, REMOVE, DRAIN, UNDRAIN)
INTO = 2  # instances that one splits into by default


@dataclass(frozen=True)
class PlanEdit:
    """A change by hand: what to do with which instances, given by their names."""

    action: str  # one of `ACTIONS`
    instances: tuple[str, ...] = ()
    into: int = INTO  # instances that one is split into
    devices: tuple[int, ...] | None = None  # of an instance that is added; None: the first that are free

    def __str__(self) -> str:
        parts = [self.action, *self.instances]
        parts += [f"into {self.into}"] if self.action == SPLIT else []
        parts += ["on devices", *map(str, self.devices)] if self.devices is not None else []
        return " ".join(parts)


@dataclass(frozen=True)
class PlanEditor:
    """An editor of plans by hand, which knows the plan of the start, the limits, and the names given so far."""

    start: Plan
    resources: Resources
    used_names: Collection[str] = ()

    def edited(self, plan: Plan, edit: PlanEdit) -> Plan:
        """Return the plan that a change leads to."""
        named = self._named(plan, edit)
        match edit.action:
            case "merge":
                return self._merge(plan, named)
            case "split":
                return self._split(plan, named, edit.into)
            case "drop":
                return self._drop(plan, named)
            case "restore":
                return self._restore(plan, named[0])
            case "add":
                return self._add(plan, edit.devices)
            case "remove":
                return _remove(plan, named)
            case "drain" | "undrain":
                changed = {instance.name: instance.with_draining(edit.action == DRAIN) for instance in named}
                return replace(plan, instances=tuple(changed.get(i.name, i) for i in plan.instances))
        raise PlanError(f"unknown action {edit.action[:60]!r}: choose from {', '.join(ACTIONS)}")

    def _named(self, plan: Plan, edit: PlanEdit) -> list[InstancePlan]:
        """Return the instances that a change names, each once and as many as it needs."""
        names = edit.instances
        needs = {SPLIT: "one instance", RESTORE: "one instance", ADD: "no instance"}
        needs |= dict.fromkeys((MERGE, DROP), "two instances or more")
        allowed = {MERGE: len(names) >= 2, DROP: len(names) >= 2, ADD: not names}
        allowed |= dict.fromkeys((SPLIT, RESTORE), len(names) == 1)
        if not allowed.get(edit.action, bool(names)):
            given = " ".join(names) or "none"
            raise PlanError(f"{edit.action} takes {needs.get(edit.action, 'one instance or more')}: given is {given}")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise PlanError(f"instance {twice} is named twice")
        return [plan.instance(name) for name in names]

    def _merge(self, plan: Plan, members: Sequence[InstancePlan]) -> Plan:
        self._check_that_instances_merge()
        degrees = {member.tp for member in members}
        if len(degrees) > 1:
            each = ", ".join(f"{member.name} on {member.tp}" for member in members)
            raise PlanError(f"only instances on equally many devices merge: {each}")
        devices = {device for member in members for device in member.devices}
        self.resources.limits_of(len(devices))
        groups = buddy_groups(self.start, self.resources.max_tp).get(len(devices), ())
        # In this order programs are compiled already.
        order = next((group for group in groups if set(group) == devices), tuple(sorted(devices)))
        (name,) = new_names(plan, 1, self.used_names)
        return with_instances(plan, members, [merged(in_buddy_order(members, order), name, self.resources)])

    def _split(self, plan: Plan, named: Sequence[InstancePlan], into: int) -> Plan:
        self._check_that_instances_merge()
        (whole,) = named
        smallest = min(instance.tp for instance in self.start.instances)
        if into < 2 or whole.tp % into or whole.tp // into < smallest:
            count = f"{whole.tp} device{'s' if whole.tp > 1 else ''}"
            least = f", and an instance has at least {smallest}" if smallest > 1 else ""
            raise PlanError(f"instance {whole.name} has {count}: it cannot split into {into}{least}")
        names = new_names(plan, into, self.used_names)
        return with_instances(plan, named, parts(whole, names, self.start, self.resources))

    def _check_that_instances_merge(self) -> None:
        if not self.resources.max_tp:
            raise PlanError("instances neither merge nor split here: start the server with a larger max_tp")

    def _drop(self, plan: Plan, members: Sequence[InstancePlan]) -> Plan:
        if self.resources.max_lanes == 1:
            raise PlanError("instances do not share their layers here: start the server with a larger max_pp")
        (name,) = new_names(plan, 1, self.used_names)
        whole = grouped_plan(members, name, self.resources)
        pages = self.resources.kv_capacity(whole)
        return with_instances(plan, members, [whole.with_kv_pages(max(whole.kv_pages, pages))])

    def _restore(self, plan: Plan, whole: InstancePlan) -> Plan:
        if whole.lanes == 1:
            raise PlanError(f"instance {whole.name} has all layers: only groups are restored")
        names, start = new_names(plan, whole.lanes, self.used_names), self.start.instances[0]
        return with_instances(plan, [whole], restored_plans(whole, names, start, start.kv_pages))

    def _add(self, plan: Plan, wanted: Sequence[int] | None) -> Plan:
        pattern = self.start.instances[0]
        devices = self._free(plan, len(pattern.devices)) if wanted is None else tuple(wanted)
        if not devices or len(set(devices)) < len(devices) or len(devices) % len(pattern.stages):
            raise PlanError(
                f"an instance cannot have devices {_words(devices)}: it needs different ones for its "
                f"{len(pattern.stages)} stages, equally many for each"
            )
        tp = len(devices) // len(pattern.stages)
        self.resources.limits_of(tp)
        (name,) = new_names(plan, 1, self.used_names)
        stages = tuple(
            replace(stage, devices=devices[index * tp : (index + 1) * tp]) for index, stage in enumerate(pattern.stages)
        )
        instance = replace(pattern, stages=stages, name=name)
        capacity = self.resources.kv_capacity(instance)
        pages = min(pattern.kv_pages, capacity) if tp == pattern.tp else capacity
        return replace(plan, instances=(*plan.instances, instance.with_kv_pages(pages)))

    def _free(self, plan: Plan, count: int) -> tuple[int, ...]:
        """Return the first devices that no instance has."""
        taken = {device for instance in plan.instances for device in instance.devices}
        free = [device for device in range(self.resources.devices) if device not in taken]
        if len(free) < count:
            raise PlanError(
                f"an instance needs {count} of the machine's {self.resources.devices} devices: {len(free)} are free"
            )
        return tuple(free[:count])


def merged(members: Sequence[InstancePlan], name: str, resources: Resources) -> InstancePlan:
    """Return the plan of the instance that members of one degree become, with all KV pages that fit."""
    first, pages = members[0], min(member.kv_pages for member in members)
    alike = [replace(member.with_kv_pages(pages), max_num_seqs=first.max_num_seqs) for member in members]
    whole = merged_plan(alike, name)
    return whole.with_kv_pages(max(whole.kv_pages, resources.kv_capacity(whole)))


def parts(whole: InstancePlan, names: Sequence[str], start: Plan, resources: Resources) -> list[InstancePlan]:
    """Return the plans of the instances that one splits into.

    Each has the KV pages and the limit on its sequences that its devices had at the start, if it had an instance there.
    """
    whole = whole.with_kv_pages(whole.kv_pages // len(names) * len(names))
    return [_at_home(part, start, resources) for part in split_plans(whole, names)]


def with_instances(plan: Plan, before: Sequence[InstancePlan], after: Sequence[InstancePlan]) -> Plan:
    """Return the next version of a plan, with some instances in the place of others."""
    names = {instance.name for instance in before}
    place = min(index for index, instance in enumerate(plan.instances) if instance.name in names)
    kept = [instance for instance in plan.instances if instance.name not in names]
    return Plan(plan.version + 1, (*kept[:place], *after, *kept[place:]))


def _at_home(part: InstancePlan, start: Plan, resources: Resources) -> InstancePlan:
    capacity = resources.kv_capacity(part)
    for instance in start.instances:
        if instance.same_place(part):
            pages = min(instance.kv_pages, capacity)
            return part.with_kv_pages(pages).with_max_num_seqs(instance.max_num_seqs)
    return part.with_kv_pages(capacity)


def _remove(plan: Plan, named: Sequence[InstancePlan]) -> Plan:
    kept = tuple(instance for instance in plan.instances if instance not in named)
    if not kept:
        raise PlanError("the last instance cannot be removed: nothing would serve")
    return replace(plan, instances=kept)


def _words(devices: Sequence[int]) -> str:
    return ", ".join(map(str, devices)) or "none"
