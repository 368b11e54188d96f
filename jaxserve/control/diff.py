"""diff: the transitions that lead from one plan to another, in an order in which every plan in between fits."""

from collections.abc import Iterable, Iterator, Sequence

from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.resources import Resources
from jaxserve.control.transitions import ResizeKVPool, SwapPrecision, Transition
from jaxserve.core.errors import PlanError


def diff(old: Plan, new: Plan, resources: Resources) -> tuple[Transition, ...]:
    """Frees before allocations: pools shrink, layers get smaller, layers get larger, pools grow.

    Applied one after the other they lead from `old` to the instances of `new`, and no stage takes more on the way than
    at one of the ends. Versions count transitions. Raises `PlanError` for what no transition can change: instances,
    stages, devices, the order of blocks, the precision of a block that is no decoder layer.
    """
    if len(old.instances) != len(new.instances):
        raise PlanError(f"the plan has {len(new.instances)} instances, {len(old.instances)} are running (dp)")
    swaps: list[Transition] = []
    resizes: list[Transition] = []
    for number, (before, after) in enumerate(zip(old.instances, new.instances, strict=True)):
        _check_shape(number, before, after)
        swaps.extend(_swaps(number, before, after, resources))
        resizes.extend(_resizes(number, before, after, resources))
    return (
        *(resize for resize in resizes if resize.bytes_freed),
        *(swap for swap in swaps if not swap.bytes_needed),
        *(swap for swap in swaps if swap.bytes_needed),
        *(resize for resize in resizes if not resize.bytes_freed),
    )


def apply(plan: Plan, transitions: Sequence[Transition]) -> Plan:
    """The plan after all of them. Raises `PlanError` if they do not start from it."""
    for transition in transitions:
        plan = transition.apply(plan)
    return plan


def _check_shape(number: int, before: InstancePlan, after: InstancePlan) -> None:
    """Raises `PlanError` where two plans of an instance differ in what cannot change."""
    if len(before.stages) != len(after.stages):
        raise PlanError(f"instance {number} has {len(after.stages)} stages, {len(before.stages)} are running (pp)")
    for index, (old, new) in enumerate(zip(before.stages, after.stages, strict=True)):
        where = f"instance {number}, stage {index}"
        if old.devices != new.devices:
            raise PlanError(f"{where} is on devices {_words(new.devices)}, it runs on {_words(old.devices)}")
        old_blocks, new_blocks = ([block.block for block in stage.blocks] for stage in (old, new))
        if old_blocks != new_blocks:
            raise PlanError(f"{where} has blocks {_words(new_blocks)}; it runs {_words(old_blocks)}")
    pages = sorted({stage.kv_pages for stage in after.stages})
    if len(pages) > 1:
        raise PlanError(f"instance {number} has stages of {_words(pages)} KV pages; they must have equally many")


def _swaps(number: int, before: InstancePlan, after: InstancePlan, resources: Resources) -> Iterator[SwapPrecision]:
    for old, new in zip(before.blocks, after.blocks, strict=True):
        if old.precision == new.precision:
            continue
        if not resources.precisions(old.block):
            raise PlanError(f"{old.block} is {old.precision}, and only decoder layers can change: {new.precision!r}")
        wanted, held = (resources.bytes_taken(old.block, block.precision) for block in (new, old))
        yield SwapPrecision(
            number,
            old.block,
            old.precision,
            new.precision,
            bytes_freed=max(0, held - wanted),
            bytes_needed=max(0, wanted - held),
            peak_bytes=wanted,
            seconds=wanted / resources.copy_rate,
        )


def _resizes(number: int, before: InstancePlan, after: InstancePlan, resources: Resources) -> Iterator[ResizeKVPool]:
    if before.kv_pages != after.kv_pages:
        taken = resources.pages_taken(after.kv_pages) - resources.pages_taken(before.kv_pages)
        change = taken * max(resources.page_bytes)
        yield ResizeKVPool(
            number,
            before.kv_pages,
            after.kv_pages,
            bytes_freed=max(0, -change),
            bytes_needed=max(0, change),
            peak_bytes=max(0, change),
            seconds=max(0, -change) / resources.copy_rate,
        )


def _words(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
