"""Groups: instances that keep one copy of the layers together, each on its devices a part of them, as a pipeline.

See KunServe, section 4.1.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from jaxserve.control.drop_plan import drop_plan
from jaxserve.control.lane_moves import lane_moves, left_over, reverse
from jaxserve.control.plan import InstancePlan, Plan, StagePlan
from jaxserve.control.resources import Resources
from jaxserve.core.block_names import is_layer, layer_index
from jaxserve.core.errors import PlanError


def grouped_plan(members: Sequence[InstancePlan], name: str, resources: Resources) -> InstancePlan:
    """Return the plan of the group that instances become, with as many KV pages for each as the largest has.

    Every device keeps consecutive blocks of those that it has: equally many layers if they divide, so that devices
    trade all arrays, and otherwise so that the fullest device has as much room for KV pages as possible. Raise
    `PlanError` if some device would have to take a layer that it has not, or none at all, or if a member is draining.
    """
    if drained := next((member.name for member in members if member.draining), None):
        raise PlanError(f"instance {drained} is draining: a group would take new requests again (undrain it first)")
    lanes = sum(member.lanes for member in members)
    rows = max(member.kv_pages // member.lanes for member in members)
    stages = sorted((stage for member in members for stage in member.stages), key=_middle)
    if len({stage.tp for stage in stages}) > 1:
        raise PlanError("instances with different degrees of tensor parallelism cannot share their layers")
    chain = members[0].blocks
    names = [block.block for block in chain]
    cuts = _equal_cuts(stages, names) or _best_cuts(stages, names, lanes, rows, resources)
    made = []
    for stage, first, last in zip(stages, cuts, cuts[1:], strict=False):
        own = {block.block: block for block in stage.blocks}
        blocks = tuple(own[block.block] for block in chain[first:last])
        made.append(StagePlan(blocks, stage.devices, rows * lanes, lanes))
    limits = [member.max_num_seqs for member in members]
    most = None if None in limits else sum(limit for limit in limits if limit is not None)
    return InstancePlan(tuple(made), name, most)


def restored_plans(
    whole: InstancePlan, names: Sequence[str], start: InstancePlan, pages: int | None = None
) -> tuple[InstancePlan, ...]:
    """Return the plans of the instances that a group becomes, each with all layers and stages as `start`.

    Layers keep the precisions that they have in the group, and instances drain if the group does. `pages` are the KV
    pages of each, by default its share.
    Raise `PlanError` if the group's stages are not those of instances such as `start`.
    """
    count, precisions = whole.lanes, whole.precisions
    if len(names) != count or len(whole.stages) != count * len(start.stages):
        raise PlanError(f"instance {whole.name} becomes {count} instances, with {len(start.stages)} stages each")
    by_stage = []
    for stage in start.stages:
        own = {block.block for block in stage.blocks}
        by_stage.append([part for part in whole.stages if {block.block for block in part.blocks} <= own])
    if any(len(parts) != count for parts in by_stage):
        raise PlanError(f"the layers of instance {whole.name} are not divided as those of instances at the start")
    pages = whole.kv_pages // count if pages is None else pages
    limit = None if whole.max_num_seqs is None else max(1, whole.max_num_seqs // count)
    made = []
    for index, name in enumerate(names):
        stages = tuple(
            replace(stage, devices=parts[index].devices, kv_pages=pages, lanes=1)
            for stage, parts in zip(start.stages, by_stage, strict=True)
        )
        made.append(InstancePlan(stages, name, limit, whole.draining).with_precisions(precisions))
    return tuple(made)


def can_restore(whole: InstancePlan, start: InstancePlan, resources: Resources) -> bool:
    """Return whether a group can become instances such as `start`.

    Devices that exchange unequally many arrays keep some until the exchange is over, for which there may be no room.
    """
    members = restored_plans(whole, [str(lane) for lane in range(whole.lanes)], start, start.kv_pages)
    left = max(left_over(reverse(lane_moves(members, whole)), members[0], resources).values(), default=0)
    room = replace(resources, budget=resources.budget - left)
    return not left or room.kv_capacity(members[0]) >= resources.limits_of(start.tp).min_pages


def group_placements(start: Plan, max_lanes: int, resources: Resources) -> tuple[InstancePlan, ...]:
    """Return plans of groups that the instances of the start can become, as drop plans choose them."""
    found: dict[tuple[str, ...], InstancePlan] = {}

    def note(group: tuple[InstancePlan, ...], other: tuple[InstancePlan, ...]) -> int:
        names = tuple(member.name for member in (*group, *other))
        found[names] = grouped_plan((*group, *other), f"of {' '.join(names)}", resources)
        return 0

    drop_plan([(instance,) for instance in start.instances], 1, note, max_lanes)
    return tuple(found.values())


def _middle(stage: StagePlan) -> float:
    """Return by what stages are ordered, so that each can keep a part of its layers: where these are in the model."""
    layers = [layer_index(block.block) for block in stage.blocks if is_layer(block.block)]
    return (layers[0] + layers[-1]) / 2


def _equal_cuts(stages: Sequence[StagePlan], chain: Sequence[str]) -> list[int] | None:
    """Return where each stage begins in the chain of blocks, and the end, with equally many layers in each stage.

    None if the layers do not divide, or a stage has not all of its share.
    """
    layers = [index for index, block in enumerate(chain) if is_layer(block)]
    each, rest = divmod(len(layers), len(stages))
    if rest or not each:
        return None
    cuts = [0, *layers[each::each], len(chain)]
    owned = ({block.block for block in stage.blocks} for stage in stages)
    shares = (chain[first:last] for first, last in pairwise(cuts))
    return cuts if all(own.issuperset(share) for own, share in zip(owned, shares, strict=True)) else None


def _best_cuts(
    stages: Sequence[StagePlan], chain: Sequence[str], lanes: int, rows: int, resources: Resources
) -> list[int]:
    """Return where each stage begins in the chain of blocks, and the end.

    The bytes of the fullest stage, with `rows` pages in each lane, are the least possible.
    """
    tp = stages[0].tp
    layers = list(accumulate((is_layer(block) for block in chain), initial=0))
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}  # end of the stages so far -> (fullest, cuts)
    for stage in stages:
        own = {block.block: block for block in stage.blocks}
        page = resources.page_bytes(stage) / max(1, sum(map(is_layer, own)))
        sizes = (
            resources.sizes.block(block, own[block].precision, tp) + is_layer(block) * lanes * rows * page
            if block in own
            else 0
            for block in chain
        )
        taken = list(accumulate(sizes, initial=0.0))
        present = [index for index, block in enumerate(chain) if block in own]
        further: dict[int, tuple[float, list[int]]] = {}
        for first, (fullest, cuts) in best.items():
            if first < present[0]:
                continue
            for last in range(first + 1, present[-1] + 2):
                if layers[last] == layers[first]:
                    continue
                worst = max(fullest, taken[last] - taken[first])
                if last not in further or worst < further[last][0]:
                    further[last] = worst, [*cuts, last]
        best = further
    if len(chain) not in best:
        raise PlanError(f"{len(stages)} stages cannot divide {layers[-1]} layers among devices that have them already")
    return best[len(chain)][1]
