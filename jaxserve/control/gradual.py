"""Merges and splits that go layer by layer while the instance serves (`executor.apart`).

    merge: the members become one instance whose layers are all apart -> its layers are joined -> its pages are joined
    split: its pages are divided -> its layers are put apart -> it becomes several instances

Instances stop only where they or their pages become others, for which no weights of layers and no KV between devices
move. A request has all of its pages on one member's side until they are joined: an instance with divided pages takes no
longer requests than its members. If anything fails, the way is gone back.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

from jaxserve.control.movement import kv_movement
from jaxserve.control.plan import InstancePlan
from jaxserve.control.request_moves import GroupedInstance, RequestMoves
from jaxserve.control.transitions import BetweenStepsOf, Rendezvous, StepsEnded, Waits
from jaxserve.core.block_names import is_layer
from jaxserve.kvcache import DividedPool, JoinedIds, PagePool
from jaxserve.scheduler.partition import SideLimits, partition

if TYPE_CHECKING:
    from jaxserve.control.regrouping import Regrouping

BETWEEN_STEPS = 0.002  # s for which layers that change may keep an instance from its next step; one layer may take more


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


@dataclass(frozen=True)
class GradualRegroup:
    """A merge or a split under way: the instance that is several together, and those that are its members.

    Instances that have ended are added to `ended`.
    """

    regrouping: "Regrouping"
    whole: InstancePlan
    members: Sequence[InstancePlan]
    ended: list[Any]

    @property
    def host(self) -> Any:
        return self.regrouping.host

    @cached_property
    def layers(self) -> list[str]:
        """The names of all layers."""
        return [block.block for block in self.whole.blocks if is_layer(block.block)]

    @property
    def names(self) -> list[str]:
        """The names of the members."""
        return [plan.name for plan in self.members]

    def merge(self) -> Waits[None]:
        """Merge instances. The merged one serves from the first rendezvous on."""
        yield Rendezvous(tuple(self.names), self._begin)
        done: list[str] = []
        try:
            yield from self._change(self.layers, done, joint=True)
        except Exception:
            try:
                yield from self._change(done[::-1], [], joint=False)
                yield Rendezvous((self.whole.name,), self._hand_over)
            finally:
                yield from self.regrouping.release(self.ended)
            raise
        yield Rendezvous((self.whole.name,), self._join_pages)

    def split(self) -> Waits[None]:
        """Split an instance. It serves until the last rendezvous."""
        yield Rendezvous((self.whole.name,), self._divide_pages)
        done: list[str] = []
        try:
            yield from self._change(self.layers, done, joint=False)
            yield Rendezvous((self.whole.name,), self._hand_over)
        except Exception:
            yield from self._change(done[::-1], [], joint=True)
            yield Rendezvous((self.whole.name,), self._join_pages)
            raise

    # -- layers

    def _change(self, layers: Sequence[str], done: list[str], *, joint: bool) -> Waits[None]:
        """Join layers, or put them apart, some between the same two steps; note those in `done`."""
        host, instance = self.host, self.host.instance(self.whole.name)
        for chunk in self._chunks(layers):
            loaded = yield from host.load_layers(instance, chunk, joint=joint)
            replaced: list[Any] = []

            def change(loaded: Any = loaded, replaced: list[Any] = replaced) -> None:
                replaced.append(host.change_layers(instance, loaded))

            try:
                fence = yield BetweenStepsOf(change, self.whole.name)
            except Exception:
                host.free_layers(loaded)
                raise
            done += chunk
            yield StepsEnded(fence)
            host.free_layers(replaced[0])

    def _chunks(self, layers: Sequence[str]) -> Iterator[Sequence[str]]:
        """Yield the layers that change between the same two steps.

        They are few enough for `BETWEEN_STEPS`, if the KV pools are full, and take no more memory beside those that
        they replace than the largest block does, which changes as well.
        """
        resources, groups = self.regrouping.resources, min(plan.kv_pages for plan in self.members)
        seconds = kv_movement(self.members, groups, resources).seconds(resources) / len(self.layers)
        sizes = {
            block.block: resources.sizes.block(block.block, block.precision, self.whole.tp)
            for block in self.whole.blocks
        }
        room = max(sizes.values()) // max(1, *(sizes[layer] for layer in self.layers))
        count = max(1, min(room, int(BETWEEN_STEPS / seconds) if seconds else room))
        for start in range(0, len(layers), count):
            yield layers[start : start + count]

    # -- instances

    def _begin(self) -> None:
        """Let members become one instance, whose layers they run apart."""
        members, ids = list(map(self.host.instance, self.names)), JoinedIds.of_equal(len(self.members))
        with ExitStack() as undo:
            moves = RequestMoves(undo, self.regrouping.now())
            taken = [moves.take(member.core) for member in members]
            pages = DividedPool([member.core.scheduler.pages for member in members])
            whole = self.host.begin_apart(members, self.whole, self.members, pages, undo)
            undo.callback(self._limit_requests, whole, None)
            self._limit_requests(whole, self.members[0].tp)
            for index, states in enumerate(taken):
                moves.give(whole.core, states, partial(ids.joined, index), partial(ids.own, index))
            self.regrouping.put_in_force(self.names, [self.whole], [whole], [])
            undo.pop_all()
        self.ended.extend(members)

    def _hand_over(self) -> None:
        """Let the members of an instance, whose layers they all run apart, become instances."""
        ids, whole = JoinedIds.of_equal(len(self.members)), self.host.instance(self.whole.name)
        pages = whole.core.scheduler.pages
        with ExitStack() as undo:
            moves = RequestMoves(undo, self.regrouping.now())
            held = {
                name: {page % ids.count for sequence in sequences for page in sequence.pages}
                for name, sequences in whole.core.unfinished.items()
            }
            # Sequences of one request that began again may have pages on several sides.
            without_side = [name for name, sides in held.items() if len(sides) != 1]
            again = moves.take(whole.core, without_side, keep_pages=False)
            states = moves.take(whole.core)
            parts = list(self.host.end_apart(whole, self.members, pages.sides, undo))
            for index, part in enumerate(parts):
                own = [state for state in states if index in held[state.request.id]]
                moves.give(part.core, own, partial(ids.own, index), partial(ids.joined, index))
            for state in again:
                moves.give(min(parts, key=lambda part: len(part.core.unfinished)).core, [state], None)
            self.regrouping.put_in_force([self.whole.name], self.members, parts, [])
            undo.pop_all()
        self.ended.append(whole)

    # -- pages

    def _divide_pages(self) -> None:
        """Let each sequence of an instance have its pages on one side, from now on too."""
        count, whole, now = len(self.members), self.host.instance(self.whole.name), self.regrouping.now()
        core, pool = whole.core, whole.core.scheduler.pages
        limits, pages = self.regrouping.resources.limits_of(self.members[0].tp), self.members[0].kv_pages
        requests = dict(core.unfinished)
        sides = partition(requests, pool, count, SideLimits(pages, limits.shapes.max_num_seqs, limits.max_len))
        homeless = core.detach(sides.too_long, keep_pages=False)
        again = core.detach(sides.recompute, keep_pages=False)
        states = core.detach()
        try:
            sides.carry_out(pool, requests, lambda pages: self.host.move_pages(whole, pages))
            parts = pool.parted(count, min_pages=min(limits.min_pages, pages), max_pages=limits.max_pages)
            self.host.know_members(whole, self.whole, self.members)
            core.scheduler.pages = DividedPool(parts)
            self._limit_requests(whole, self.members[0].tp)
        finally:
            divided = isinstance(core.scheduler.pages, DividedPool)
            core.attach(states, lambda page: page, now)
            core.attach([*again, *([] if divided else homeless)], None, now)
        self.host.leave(homeless)

    def _join_pages(self) -> None:
        """Let the sequences of an instance have any pages again."""
        whole = self.host.instance(self.whole.name)
        core, limits = whole.core, self.regrouping.resources.limits_of(self.whole.tp)
        sides = core.scheduler.pages.sides
        least = min(limits.min_pages, sum(side.num_pages for side in sides))
        states = core.detach()
        try:
            core.scheduler.pages = PagePool.joined(sides, min_pages=least, max_pages=limits.max_pages)
            self._limit_requests(whole, None)
        finally:
            core.attach(states, lambda page: page, self.regrouping.now())

    def _limit_requests(self, whole: GroupedInstance, degree: int | None) -> None:
        """Let the instance hold requests as long as one of a degree does; None: as long as its own degree does."""
        whole.core.capacity = self.regrouping.resources.limits_of(degree or self.whole.tp).max_len
        self.regrouping.in_force.limit_requests(self.whole.name, degree)
