"""The transitions from one plan to another, ordered so that every plan in between fits."""

from collections.abc import Iterable, Iterator

from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.resources import Resources
from jaxserve.control.transitions import LimitSequences, ResizeKVPool, SetDraining, SwapPrecision, Transition
from jaxserve.core.errors import PlanError


def diff(old: InstancePlan, new: InstancePlan, resources: Resources) -> tuple[Transition, ...]:
    """Return the transitions that lead from one plan of an instance to another.

    Memory is freed before it is taken: pools shrink, layers get smaller, layers get larger, pools grow. So no stage
    takes more memory on the way than under the larger of the two plans. Fewer sequences come first and more come last.

    Raise `PlanError` if the plans differ in what no transition changes: the name, the number of stages, devices, the
    order of blocks, or the precision of a block that is not a decoder layer.
    """
    _check_structure(old, new)
    swaps = tuple(_swaps(old, new, resources))
    resizes = tuple(_resizes(old, new, resources))
    limits = tuple(_limits(old, new))
    return (
        *(() if old.draining == new.draining else (SetDraining(old.name, new.draining),)),
        *(limit for limit in limits if limit.lowers),
        *(resize for resize in resizes if resize.after < resize.before),
        *(swap for swap in swaps if not swap.bytes_needed),
        *(swap for swap in swaps if swap.bytes_needed),
        *(resize for resize in resizes if resize.after > resize.before),
        *(limit for limit in limits if not limit.lowers),
    )


def diff_all(old: Plan, new: Plan, resources: Resources) -> tuple[Transition, ...]:
    """Return the transitions from one plan to another, instance by instance.

    Raise `PlanError` as `diff` does, and if the plans have other instances.
    """
    check_instances(old, new)
    return tuple(
        transition
        for instance in old.instances
        for transition in diff(instance, new.instance(instance.name), resources)
    )


def check_instances(old: Plan, new: Plan) -> None:
    """Raise `PlanError` unless two plans have the same instances."""
    if len(old.instances) != len(new.instances):
        raise PlanError(f"the plan has {len(new.instances)} instances: it must have {len(old.instances)} (dp)")
    names = [instance.name for instance in new.instances]
    if len(set(names)) < len(names):
        raise PlanError(f"the plan names an instance twice: {_words(names)}")
    for instance in old.instances:
        new.instance(instance.name)


def _check_structure(before: InstancePlan, after: InstancePlan) -> None:
    """Raise `PlanError` if two plans of an instance differ in what no transition changes."""
    name = before.name
    if after.name != name:
        raise PlanError(f"the plan is that of instance {after.name}: it must be that of instance {name}")
    if len(before.stages) != len(after.stages):
        raise PlanError(f"instance {name} has {len(after.stages)} stages: it must have {len(before.stages)} (pp)")
    for stage, (old, new) in enumerate(zip(before.stages, after.stages, strict=True)):
        where = f"instance {name}, stage {stage}"
        if old.devices != new.devices:
            raise PlanError(f"{where} is on devices {_words(new.devices)}: it must stay on {_words(old.devices)}")
        old_blocks, new_blocks = ([block.block for block in plan.blocks] for plan in (old, new))
        if old_blocks != new_blocks:
            raise PlanError(
                f"{where} has blocks {_words(new_blocks)}: they must be {_words(old_blocks)}, in this order"
            )
    pages = sorted({stage.kv_pages for stage in after.stages})
    if len(pages) > 1:
        raise PlanError(f"instance {name} has stages of {_words(pages)} KV pages: all must have the same number")


def _swaps(before: InstancePlan, after: InstancePlan, resources: Resources) -> Iterator[SwapPrecision]:
    for old_stage, new_stage in zip(before.stages, after.stages, strict=True):
        for old, new in zip(old_stage.blocks, new_stage.blocks, strict=True):
            if old.precision == new.precision:
                continue
            if not resources.precisions(old.block):
                raise PlanError(
                    f"{old.block} is {old.precision} and cannot change to {new.precision!r}: "
                    "only decoder layers can change"
                )
            old_bytes, new_bytes = (
                resources.bytes_taken(old.block, block.precision, old_stage.tp) for block in (old, new)
            )
            yield SwapPrecision(
                before.name,
                old.block,
                old.precision,
                new.precision,
                devices=old_stage.devices,
                bytes_before=old_bytes,
                bytes_after=new_bytes,
                seconds=new_bytes / resources.copy_rate,
            )


def _resizes(before: InstancePlan, after: InstancePlan, resources: Resources) -> Iterator[ResizeKVPool]:
    if before.kv_pages != after.kv_pages:
        resized = before.with_kv_pages(after.kv_pages)
        change = max(resources.change(before, resized).values(), key=abs)
        seconds = max(0, -change) / resources.copy_rate
        yield ResizeKVPool(before.name, before.kv_pages, after.kv_pages, change, seconds)


def _limits(before: InstancePlan, after: InstancePlan) -> Iterator[LimitSequences]:
    if before.max_num_seqs != after.max_num_seqs:
        yield LimitSequences(before.name, before.max_num_seqs, after.max_num_seqs)


def _words(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
