"""The transitions from one plan to another, ordered so that every plan in between fits."""

from collections.abc import Iterable, Iterator, Sequence

from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.resources import Resources
from jaxserve.control.transitions import ResizeKVPool, SwapPrecision, Transition
from jaxserve.core.errors import PlanError


def diff(old: Plan, new: Plan, resources: Resources) -> tuple[Transition, ...]:
    """Return the transitions that lead from `old` to the instances of `new`, each of which adds 1 to the version.

    Memory is freed before it is taken: pools shrink, layers get smaller, layers get larger, pools grow. So no stage
    takes more memory on the way than under the larger of the two plans.

    Raise `PlanError` if the plans differ in what no transition changes: the number of instances or stages, devices, the
    order of blocks, or the precision of a block that is not a decoder layer.
    """
    if len(old.instances) != len(new.instances):
        raise PlanError(f"the plan has {len(new.instances)} instances: it must have {len(old.instances)} (dp)")
    swaps: list[Transition] = []
    resizes: list[Transition] = []
    for index, (before, after) in enumerate(zip(old.instances, new.instances, strict=True)):
        _check_structure(index, before, after)
        swaps.extend(_swaps(index, before, after, resources))
        resizes.extend(_resizes(index, before, after, resources))
    return (
        *(resize for resize in resizes if resize.bytes_freed),
        *(swap for swap in swaps if not swap.bytes_needed),
        *(swap for swap in swaps if swap.bytes_needed),
        *(resize for resize in resizes if not resize.bytes_freed),
    )


def apply(plan: Plan, transitions: Sequence[Transition]) -> Plan:
    """Return the plan after all transitions. Raise `PlanError` if they do not start from `plan`."""
    for transition in transitions:
        plan = transition.apply(plan)
    return plan


def _check_structure(instance: int, before: InstancePlan, after: InstancePlan) -> None:
    """Raise `PlanError` if two plans of an instance differ in what no transition changes."""
    if len(before.stages) != len(after.stages):
        raise PlanError(f"instance {instance} has {len(after.stages)} stages: it must have {len(before.stages)} (pp)")
    for stage, (old, new) in enumerate(zip(before.stages, after.stages, strict=True)):
        where = f"instance {instance}, stage {stage}"
        if old.devices != new.devices:
            raise PlanError(f"{where} is on devices {_words(new.devices)}: it must stay on {_words(old.devices)}")
        old_blocks, new_blocks = ([block.block for block in plan.blocks] for plan in (old, new))
        if old_blocks != new_blocks:
            raise PlanError(
                f"{where} has blocks {_words(new_blocks)}: they must be {_words(old_blocks)}, in this order"
            )
    pages = sorted({stage.kv_pages for stage in after.stages})
    if len(pages) > 1:
        raise PlanError(f"instance {instance} has stages of {_words(pages)} KV pages: all must have the same number")


def _swaps(index: int, before: InstancePlan, after: InstancePlan, resources: Resources) -> Iterator[SwapPrecision]:
    for old, new in zip(before.blocks, after.blocks, strict=True):
        if old.precision == new.precision:
            continue
        if not resources.precisions(old.block):
            raise PlanError(
                f"{old.block} is {old.precision} and cannot change to {new.precision!r}: only decoder layers can change"
            )
        new_bytes, old_bytes = (resources.bytes_taken(old.block, block.precision) for block in (new, old))
        yield SwapPrecision(
            index,
            old.block,
            old.precision,
            new.precision,
            bytes_freed=max(0, old_bytes - new_bytes),
            bytes_needed=max(0, new_bytes - old_bytes),
            peak_bytes=new_bytes,
            seconds=new_bytes / resources.copy_rate,
        )


def _resizes(index: int, before: InstancePlan, after: InstancePlan, resources: Resources) -> Iterator[ResizeKVPool]:
    if before.kv_pages != after.kv_pages:
        taken = resources.pages_taken(after.kv_pages) - resources.pages_taken(before.kv_pages)
        change = taken * max(resources.page_bytes)
        yield ResizeKVPool(
            index,
            before.kv_pages,
            after.kv_pages,
            bytes_freed=max(0, -change),
            bytes_needed=max(0, change),
            peak_bytes=max(0, change),
            seconds=max(0, -change) / resources.copy_rate,
        )


def _words(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
