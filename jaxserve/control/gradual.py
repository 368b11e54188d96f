"""Merges and splits that go layer by layer while the instance serves (`executor.apart`).

    merge: the members become one instance whose layers are all apart -> its layers are joined -> its pages are joined
    split: its pages are divided -> its layers are put apart -> it becomes several instances

Only the first step of a merge and the last one of a split stop instances, and they move no weights of layers and no KV.
If anything fails, the way is gone back.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from jaxserve.control.plan import InstancePlan
from jaxserve.control.regroup import Regroup
from jaxserve.control.request_moves import GroupedInstance, RequestMoves
from jaxserve.control.transitions import BetweenStepsOf, Rendezvous, StepsEnded, Waits
from jaxserve.core.block_names import is_layer
from jaxserve.kvcache import DividedPool, PagePool
from jaxserve.scheduler.partition import SideLimits, partition

LAYERS_AT_ONCE = 2  # layers that change between the same two steps


class GradualHost(Protocol):
    """What an `InstanceHost` offers for merges and splits that go layer by layer."""

    def leave(self, requests: Sequence[Any]) -> None:
        """Find other instances for requests that have left theirs, or let them wait."""
        ...

    def begin_apart(
        self,
        members: Sequence[Any],
        plan: InstancePlan,
        plans: Sequence[InstancePlan],
        pages: PagePool,
        undo: ExitStack,
    ) -> GroupedInstance:
        """Return the instance that members with these plans become, with all of its layers apart."""
        ...

    def know_members(self, instance: Any, plan: InstancePlan, plans: Sequence[InstancePlan]) -> None:
        """Prepare an instance, whose layers are all joint, for members that shall run them apart."""
        ...

    def load_layers(self, instance: Any, layers: Sequence[str], *, joint: bool) -> Waits[Any]:
        """Make layers for all devices together, or for each member, while steps go on."""
        ...

    def change_layers(self, instance: Any, loaded: Any) -> Any:
        """Run the layers that were made from the next step on, between two steps. Return what they replace."""
        ...

    def free_layers(self, replaced: Any) -> None:
        """Free layers that were replaced, or were made and not used."""
        ...

    def end_apart(
        self, instance: Any, plans: Sequence[InstancePlan], pages: Sequence[PagePool], undo: ExitStack
    ) -> Sequence[GroupedInstance]:
        """Return the instances that the members of an instance become, all of whose layers are apart."""
        ...


def merge_gradually(regrouping: Any, regroup: Regroup, before: Sequence[InstancePlan], ended: list[Any]) -> Waits[None]:
    """Merge instances. The merged one serves from the first rendezvous on."""
    plan, host = regroup.after[0], regrouping.host
    yield Rendezvous(regroup.before, partial(_begin, regrouping, regroup, before, ended))
    done: list[str] = []
    try:
        yield from _change_all(host, plan, done, joint=True)
    except Exception:
        try:
            yield from _change_all(host, plan, [], joint=False, layers=done[::-1])
            yield Rendezvous((plan.name,), partial(_hand_over, regrouping, plan, before, ended))
        finally:
            yield from regrouping.release(regroup, ended)
        raise
    yield BetweenStepsOf(partial(_join_pages, regrouping, plan), plan.name)


def split_gradually(regrouping: Any, regroup: Regroup, before: Sequence[InstancePlan], ended: list[Any]) -> Waits[None]:
    """Split an instance. It serves until the last rendezvous."""
    plan, host = before[0], regrouping.host
    yield Rendezvous((plan.name,), partial(_divide_pages, regrouping, plan, regroup.after))
    done: list[str] = []
    try:
        yield from _change_all(host, plan, done, joint=False)
        yield Rendezvous((plan.name,), partial(_hand_over, regrouping, plan, regroup.after, ended))
    except Exception:
        yield from _change_all(host, plan, [], joint=True, layers=done[::-1])
        yield BetweenStepsOf(partial(_join_pages, regrouping, plan), plan.name)
        raise


def _change_all(
    host: Any, plan: InstancePlan, done: list[str], *, joint: bool, layers: Sequence[str] | None = None
) -> Waits[None]:
    """Join the layers of an instance, or put them apart, a few between the same two steps; note those in `done`."""
    instance = host.instance(plan.name)
    names = [block.block for block in plan.blocks if is_layer(block.block)] if layers is None else layers
    for chunk in _chunks(names):
        loaded = yield from host.load_layers(instance, chunk, joint=joint)
        replaced: list[Any] = []
        try:
            fence = yield BetweenStepsOf(partial(_change, host, instance, loaded, replaced), plan.name)
        except Exception:
            host.free_layers(loaded)
            raise
        done += chunk
        yield StepsEnded(fence)
        host.free_layers(replaced[0])


def _change(host: Any, instance: Any, loaded: Any, replaced: list[Any]) -> None:
    replaced.append(host.change_layers(instance, loaded))


def _begin(regrouping: Any, regroup: Regroup, before: Sequence[InstancePlan], ended: list[Any]) -> None:
    """Let members become one instance, whose layers they run apart."""
    host, (plan,) = regrouping.host, regroup.after
    members, count = [host.instance(name) for name in regroup.before], len(regroup.before)
    with ExitStack() as undo:
        moves = RequestMoves(undo, regrouping.now())
        taken = [moves.take(member.core) for member in members]
        pages = DividedPool([member.core.scheduler.pages for member in members])
        whole = host.begin_apart(members, plan, before, pages, undo)
        for index, states in enumerate(taken):
            moves.give(whole.core, states, partial(_joined, count, index), partial(_parted, count))
        regrouping.put_in_force(regroup.before, [plan], [whole], [])
        undo.pop_all()
    ended += members


def _hand_over(regrouping: Any, plan: InstancePlan, after: Sequence[InstancePlan], ended: list[Any]) -> None:
    """Let the members of an instance, whose layers they all run apart, become instances."""
    host, count = regrouping.host, len(after)
    whole = host.instance(plan.name)
    pages = whole.core.scheduler.pages
    with ExitStack() as undo:
        moves = RequestMoves(undo, regrouping.now())
        held = {
            name: {page % count for sequence in sequences for page in sequence.pages}
            for name, sequences in whole.core.unfinished.items()
        }
        # Sequences of one request that began again may have pages on several sides.
        without_side = [name for name, sides in held.items() if len(sides) != 1]
        again = moves.take(whole.core, without_side, keep_pages=False)
        states = moves.take(whole.core)
        parts = list(host.end_apart(whole, after, pages.sides, undo))
        for index, part in enumerate(parts):
            own = [state for state in states if index in held[state.request.id]]
            moves.give(part.core, own, partial(_parted, count), partial(_joined, count, index))
        for state in again:
            moves.give(min(parts, key=lambda part: len(part.core.unfinished)).core, [state], None)
        regrouping.put_in_force([plan.name], after, parts, [])
        undo.pop_all()
    ended.append(whole)


def _divide_pages(regrouping: Any, plan: InstancePlan, after: Sequence[InstancePlan]) -> None:
    """Let each sequence of an instance have its pages on one side, from now on too."""
    host, count = regrouping.host, len(after)
    whole = host.instance(plan.name)
    core, pool, now = whole.core, whole.core.scheduler.pages, regrouping.now()
    limits = regrouping.resources.limits_of(after[0].tp)
    requests = dict(core.unfinished)
    sides = partition(requests, pool, count, SideLimits(after[0].kv_pages, limits.shapes.max_num_seqs, limits.max_len))
    homeless = core.detach(sides.too_long, keep_pages=False)
    again = core.detach(sides.recompute, keep_pages=False)
    states = core.detach()
    try:
        sides.carry_out(pool, requests, lambda pages: host.move_pages(whole, pages))
        parts = pool.parted(count, min_pages=min(limits.min_pages, after[0].kv_pages), max_pages=limits.max_pages)
        host.know_members(whole, plan, after)
        core.scheduler.pages = DividedPool(parts)
    finally:
        core.attach(states, lambda page: page, now)
        core.attach([*again, *([] if isinstance(core.scheduler.pages, DividedPool) else homeless)], None, now)
    host.leave(homeless)


def _join_pages(regrouping: Any, plan: InstancePlan) -> None:
    """Let the sequences of an instance have any pages again."""
    scheduler, limits = regrouping.host.instance(plan.name).core.scheduler, regrouping.resources.limits_of(plan.tp)
    sides = scheduler.pages.sides
    size = sum(side.num_pages for side in sides)
    scheduler.pages = PagePool.joined(sides, min_pages=min(limits.min_pages, size), max_pages=limits.max_pages)


def _chunks(names: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), LAYERS_AT_ONCE):
        yield list(names[start : start + LAYERS_AT_ONCE])


def _joined(count: int, index: int, page: int) -> int:
    return count * page + index


def _parted(count: int, page: int) -> int:
    return page // count
