"""The procedure that regroups instances: the rules for all kinds of regroups, on real and simulated devices.

    stage, while all instances serve -> rendezvous: move weights, KV and requests -> release

As `control.reconfigure`, it is a generator that yields waits to a driver. If anything fails, the instances that were to
end go on with all their requests.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from jaxserve.control.exchange import Exchanged, ExchangeHost, PageExchange, RowCost
from jaxserve.control.gradual import GradualRegroup
from jaxserve.control.lane_moves import Trade, lane_moves, left_over, reverse, trades
from jaxserve.control.ledger import DeviceEntries, DeviceLedgers
from jaxserve.control.movement import lane_movement, movement
from jaxserve.control.plan import InstancePlan, PlanInForce
from jaxserve.control.reconfigure import SWAP_BUFFER, Cancelled, PlanFacts, Report
from jaxserve.control.recovery import lost_devices
from jaxserve.control.regroup import Kind, Regroup, kind_of
from jaxserve.control.request_moves import GroupedInstance, RequestMoves
from jaxserve.control.resources import Resources
from jaxserve.control.transitions import Beside, Outcome, Rendezvous, Sleep, Waits
from jaxserve.core.errors import EngineFailed, JaxserveError
from jaxserve.kvcache import JoinedIds, PagePool
from jaxserve.scheduler.partition import SideLimits, partition

log = logging.getLogger(__name__)

OWNER = "regroup"  # of the ledgers' entries of what is taken while instances are regrouped
POLL_S = 0.005  # how often a regroup looks whether the KV pages of its instances have come


class InstanceHost(ExchangeHost, Protocol):
    """What makes, moves and ends instances, on real or simulated devices.

    Methods with `undo` put what reverses them there, so that an error in a later one changes nothing.
    """

    def instance(self, name: str) -> GroupedInstance:
        """Return an instance that serves."""
        ...

    @property
    def failed(self) -> Mapping[str, BaseException]:
        """The instances that have failed and keep their requests, by name, with their errors."""
        ...

    def abandon(self, instance: Any, lost: Collection[int]) -> None:
        """Free the KV of an instance that has failed, and what it has on stages whose devices are lost."""
        ...

    def stage(self, plans: Sequence[InstancePlan], seconds: float) -> Waits[Mapping[str, Any]]:
        """Load what instances need on devices of their own, estimated to take `seconds`. Return it by their names."""
        ...

    def discard(self, staged: Mapping[str, Any]) -> None:
        """Free what was staged for instances that do not begin."""
        ...

    def open(self, plan: InstancePlan, staged: Any, undo: ExitStack) -> GroupedInstance:
        """Return a new instance, without requests, on what was staged for it."""
        ...

    def merge(self, members: Sequence[Any], plan: InstancePlan, pages: PagePool, undo: ExitStack) -> GroupedInstance:
        """Return an instance on the devices of its members, with their weights and KV, without requests.

        Page p of member i of n is page n p + i of the new one, whose pages are `pages`.
        """
        ...

    def split(
        self, whole: Any, plans: Sequence[InstancePlan], pages: Sequence[PagePool], undo: ExitStack
    ) -> Sequence[GroupedInstance]:
        """Return the instances that one becomes: the reverse of `merge`."""
        ...

    def drop(
        self, members: Sequence[Any], trades: Sequence[Trade], plan: InstancePlan, pages: PagePool, undo: ExitStack
    ) -> GroupedInstance:
        """Return an instance on the devices of its members, each with the part of its layers that `plan` says.

        The devices trade the arrays of `trades`. Pages have the ids of `JoinedIds`. Those that other devices keep from
        now on have no contents before the exchange.
        """
        ...

    def restore(
        self,
        whole: Any,
        trades: Sequence[Trade],
        plans: Sequence[InstancePlan],
        pages: Sequence[PagePool],
        undo: ExitStack,
    ) -> Sequence[GroupedInstance]:
        """Return the instances with all layers that a group becomes: the reverse of `drop`."""
        ...

    def stage_layers(self, plans: Sequence[InstancePlan], seconds: float) -> Waits[Any]:
        """Load the layers that devices lack for `restore`, beside serving, estimated to take `seconds`."""
        ...

    def discard_layers(self, staged: Any) -> None:
        """Give up the hold on layers that were loaded: those that no instance uses are freed."""
        ...

    def move_pages(self, instance: Any, moves: Mapping[int, int]) -> None:
        """Copy pages of an instance (source: target)."""
        ...

    def copy_pages(self, source: Any, target: Any, pages: Mapping[int, int]) -> None:
        """Copy pages of an instance to pages of another one (source: target)."""
        ...

    def replace(self, before: Collection[str], after: Mapping[str, Any], homeless: Sequence[Any]) -> None:
        """Let instances step and take requests in the place of others, or raise and change nothing.

        The `homeless` requests, which no instance can hold, wait for another plan.
        """
        ...

    def release(self, ended: Sequence[Any]) -> Waits[None]:
        """Free what instances have left that do not serve any more."""
        ...


@dataclass
class Staged:
    """What was loaded for new instances while others serve."""

    parts: Mapping[str, Any] = field(default_factory=dict)  # by the names of instances on devices of their own
    layers: Any = None


@dataclass(frozen=True)
class Regrouping:
    """The procedure for all instances of an engine."""

    host: InstanceHost
    in_force: PlanInForce
    resources: Resources
    ledgers: DeviceLedgers
    entries: Callable[[InstancePlan], DeviceEntries]  # the plan's bytes, by device and name
    facts: PlanFacts
    now: Callable[[], float]  # s
    longest_stop: float = 0.02  # s for which a merge or a split may stop its instances
    exchanged: Callable[[Exchanged], None] = lambda done: None  # takes note of each exchange of KV pages
    _exchanging: set[str] = field(default_factory=set)

    @property
    def exchanging(self) -> frozenset[str]:
        """The names of the instances whose KV pages are on their way, and of those that have ended and still have them.

        They cannot be regrouped before these have come.
        """
        return frozenset(self._exchanging)

    def carry_out(self, regroups: Sequence[Regroup], report: Report) -> Waits[None]:
        """Carry out regroups in order, and report the outcome of each. After one that fails the rest is dropped.

        A regroup has come to its end when its instances serve. KV pages that they exchange follow beside all else.
        """
        for regroup in regroups:
            began = self.now()
            try:
                yield from self._carry_out(regroup)
            except Exception as error:
                unexpected = not isinstance(error, JaxserveError | ValueError)
                log.warning("the instances stay: %s: %s", regroup, error, exc_info=unexpected)
                report(Outcome(regroup, f"{type(error).__name__}: {error}", self.now() - began), error)
                return
            report(Outcome(regroup, None, self.now() - began), None)

    def _carry_out(self, regroup: Regroup) -> Waits[None]:
        before = tuple(map(self.in_force.instance, regroup.before))
        kind = Kind.RECOVER if regroup.recovers else kind_of(before, regroup.after)
        others = [plan.name for plan in self.in_force.plan.instances if plan.name not in regroup.before]
        stopped = (*regroup.before, *(others if kind is Kind.COPY and before else ()))
        while not self._exchanging.isdisjoint(stopped):
            yield Sleep(self.now() + POLL_S)
        self._check(regroup)
        owner = self._book(kind, before, regroup.after)
        staged = Staged()
        ended: list[Any] = []
        exchange: PageExchange | None = None
        try:
            if kind in (Kind.MERGE, Kind.SPLIT) and self.gradual(before, regroup.after):
                whole, members = (regroup.after[0], before) if kind is Kind.MERGE else (before[0], regroup.after)
                gradual = GradualRegroup(self, whole, members, ended)
                yield from gradual.merge() if kind is Kind.MERGE else gradual.split()
            else:
                if kind is Kind.RECOVER:
                    yield Rendezvous(regroup.before, partial(self._abandon, before))
                yield from self._stage(kind, before, regroup.after, staged)
                if kind in (Kind.DROP, Kind.RESTORE):
                    exchange = self._exchange(before, regroup.after)
                commit = partial(self._commit, regroup, before, kind, staged.parts, others, ended, exchange)
                yield Rendezvous(stopped, commit)
        except BaseException:
            self.host.discard(staged.parts)
            self.ledgers.replace({owner: {}})
            raise
        finally:
            self.host.discard_layers(staged.layers)
        if exchange is None:
            yield from self._end(regroup, owner, ended)
        else:
            yield Beside(self._exchange_pages(exchange, regroup, owner, ended))

    def _exchange_pages(
        self, exchange: PageExchange, regroup: Regroup, owner: str, ended: Sequence[Any]
    ) -> Waits[None]:
        """Let KV pages follow, beside all else."""
        try:
            yield from exchange.carry_out()
            self.exchanged(exchange.done)
            yield from self._end(regroup, owner, ended)
        except Cancelled:
            pass  # the engine is closing, and frees everything
        finally:
            self._exchanging.difference_update(_names(regroup))

    def _end(self, regroup: Regroup, owner: str, ended: Sequence[Any]) -> Waits[None]:
        """Free what instances have left that have ended."""
        yield from self.release(ended)
        gone: dict[str, DeviceEntries] = {name: {} for name in (*regroup.before, owner)}
        self.ledgers.replace(gone | {plan.name: self.entries(plan) for plan in regroup.after})

    def _check(self, regroup: Regroup) -> None:
        """Raise `EngineFailed` if an instance has failed for which the regroup does not make up."""
        failed = [name for name in regroup.before if name in self.host.failed]
        if failed and not regroup.recovers:
            raise EngineFailed(f"instance {failed[0]} has failed")

    def _abandon(self, before: Sequence[InstancePlan]) -> None:
        """Free what instances that have failed need no more, so that others have room."""
        for plan in before:
            if error := self.host.failed.get(plan.name):
                self.host.abandon(self.host.instance(plan.name), lost_devices(plan, error))

    def _stage(
        self, kind: Kind, before: Sequence[InstancePlan], after: Sequence[InstancePlan], staged: "Staged"
    ) -> Waits[None]:
        """Load what new instances need, while all instances serve."""
        if kind in (Kind.COPY, Kind.RECOVER):
            staged.parts = yield from self.host.stage(after, self._seconds(before, after))
        elif kind is Kind.RESTORE:
            staged.layers = yield from self.host.stage_layers(after, self._seconds(before, after))

    def _exchange(self, before: Sequence[InstancePlan], after: Sequence[InstancePlan]) -> PageExchange:
        row, resources = lane_movement(before, after, 1, self.resources), self.resources
        room = min(resources.stage_entries(stage).get("exchange", 0) for plan in after for stage in plan.stages)
        cost = RowCost(row.seconds(resources), row.bytes_by_link, max(1, room // max((*row.peak.values(), 1))))
        return PageExchange(self.host, after[0].lanes, len(after[0].stages), cost, self.now)

    def gradual(self, before: Sequence[InstancePlan], after: Sequence[InstancePlan]) -> bool:
        """Return whether a merge or a split goes layer by layer, because it would stop its instances for too long.

        It would with pools full of contents.
        """
        groups = min(plan.kv_pages for plan in (*before, *after))
        return self._seconds(before, after, groups) > self.longest_stop

    def release(self, ended: Sequence[Any]) -> Waits[None]:
        """Free what instances have left that have ended."""
        try:
            yield from self.host.release(ended)
        except Exception:
            log.exception("instances have ended, and what they had may not have been freed")

    def _book(self, kind: Kind, before: Sequence[InstancePlan], after: Sequence[InstancePlan]) -> str:
        """Book what devices take while instances are regrouped beyond what those that end have booked.

        Return the name of the ledgers' entries.
        """
        old, new = _totals(map(self.entries, before)), _totals(map(self.entries, after))
        match kind:
            case Kind.DROP:
                largest = max(before, key=lambda plan: plan.kv_pages // plan.lanes)
                new.update(left_over(lane_moves(before, after[0]), largest, self.resources))
            case Kind.RESTORE:
                new.update(left_over(reverse(lane_moves(after, before[0])), after[0], self.resources))
        more = {device: size - old[device] for device, size in new.items() if size > old[device]}
        owner = " ".join((OWNER, *(plan.name for plan in before)))
        self.ledgers.replace({owner: {device: {SWAP_BUFFER: size} for device, size in more.items()}})
        return owner

    def _seconds(self, before: Sequence[InstancePlan], after: Sequence[InstancePlan], groups: int = 0) -> float:
        """Estimate how long it takes to move the weights of instances, and groups of KV pages (`movement`)."""
        names = {plan.name for plan in before}
        others = [plan for plan in self.in_force.plan.instances if plan.name not in names]
        return movement(before, after, self.resources, groups, others).seconds(self.resources)

    # -- at the rendezvous

    def _commit(
        self,
        regroup: Regroup,
        before: Sequence[InstancePlan],
        kind: Kind,
        staged: Mapping[str, Any],
        others: Sequence[str],
        ended: list[Any],
        exchange: PageExchange | None,
    ) -> None:
        """Move everything and put the new instances in force, as a whole, or change nothing and raise.

        The instances that have ended are added to `ended`.
        """
        self._check(regroup)
        ending = [self.host.instance(plan.name) for plan in before]
        homeless: list[Any] = []
        with ExitStack() as undo:
            moves = RequestMoves(undo, self.now())
            if kind.joins:
                made = [self._join(kind, before, ending, regroup.after[0], moves, undo)]
            elif kind.parts:
                made, homeless = self._part(kind, before[0], ending[0], regroup.after, moves, undo)
            else:
                made = [self.host.open(plan, staged[plan.name], undo) for plan in regroup.after]
                targets = [*made, *(self.host.instance(name) for name in others if name not in self.host.failed)]
                for source in ending:
                    if kind is Kind.RECOVER:
                        homeless += moves.take(source.core, keep_pages=False)
                        continue
                    homeless += self._copy(source, before, targets, moves)
            if exchange is not None:
                exchange.begin([plan.name for plan in regroup.after], made)
                self._exchanging.update(_names(regroup))
                undo.callback(self._exchanging.difference_update, _names(regroup))
            self.put_in_force(regroup.before, regroup.after, made, homeless)
            undo.pop_all()
        ended += ending

    def put_in_force(
        self, before: Sequence[str], after: Sequence[InstancePlan], made: Sequence[Any], homeless: Sequence[Any]
    ) -> None:
        """Let new instances serve in the place of others, or raise and change nothing."""
        expected = self.in_force.version + 1
        for plan, instance in zip(after, made, strict=True):
            instance.core.replan(*self.facts.of(plan, expected))
        self.host.replace(before, dict(zip([plan.name for plan in after], made, strict=True)), homeless)
        version = self.in_force.regroup(before, after)
        if version != expected:  # other instances have changed meanwhile, for which nobody waits
            for plan, instance in zip(after, made, strict=True):
                instance.core.replan(*self.facts.of(plan, version))

    def _join(
        self,
        kind: Kind,
        before: Sequence[InstancePlan],
        members: Sequence[GroupedInstance],
        plan: InstancePlan,
        moves: RequestMoves,
        undo: ExitStack,
    ) -> GroupedInstance:
        """Return the instance that others become, with all of their requests."""
        ids, limits = JoinedIds(tuple(member.lanes for member in before)), self.resources.limits_of(plan.tp, plan.lanes)
        taken = [moves.take(member.core) for member in members]
        pools = [member.core.scheduler.pages for member in members]
        # The longest sequence may need more pages than the members have together. The pool grows to these right after
        # the merge, and has at least as many from then on, except right before a split.
        least = min(limits.min_pages, sum(pool.min_pages for pool in pools))
        pages = PagePool.joined(pools, min_pages=least, max_pages=limits.max_pages, lanes=ids.lanes)
        if kind is Kind.DROP:
            pages.grow(plan.kv_pages - pages.num_pages)
            whole = self.host.drop(members, trades(lane_moves(before, plan)), plan, pages, undo)
        else:
            whole = self.host.merge(members, plan, pages, undo)
        for index, states in enumerate(taken):
            moves.give(whole.core, states, partial(ids.joined, index), partial(ids.own, index))
        return whole

    def _part(
        self,
        kind: Kind,
        before: InstancePlan,
        whole: GroupedInstance,
        plans: Sequence[InstancePlan],
        moves: RequestMoves,
        undo: ExitStack,
    ) -> tuple[list[GroupedInstance], list[Any]]:
        """Return the instances that one becomes, with its requests, and those of them that none can hold."""
        ids, limits = JoinedIds.of_equal(len(plans)), self.resources.limits_of(plans[0].tp)
        core, pool, count = whole.core, whole.core.scheduler.pages, ids.count
        requests = dict(core.unfinished)
        held = SideLimits(plans[0].kv_pages, limits.shapes.max_num_seqs, limits.max_len)
        sides = partition(requests, pool, count, held)
        homeless = moves.take(core, sides.too_long, keep_pages=False)
        without_pages = moves.take(core, sides.recompute, keep_pages=False)
        states = moves.take(core)
        sides.carry_out(pool, requests, lambda pages: self.host.move_pages(whole, pages))
        least = min(limits.min_pages, pool.num_pages // count)
        pools = pool.parted(count, min_pages=least, max_pages=limits.max_pages)
        if kind is Kind.RESTORE:
            parts = list(self.host.restore(whole, trades(reverse(lane_moves(plans, before))), plans, pools, undo))
        else:
            parts = list(self.host.split(whole, plans, pools, undo))
        for index, part in enumerate(parts):
            own = [state for state in states if sides.sides[state.request.id] == index]
            moves.give(part.core, own, partial(ids.own, index), partial(ids.joined, index))
            again = [state for state in without_pages if sides.sides[state.request.id] == index]
            moves.give(part.core, again, None)
        return parts, homeless

    def _copy(
        self,
        source: GroupedInstance,
        before: Sequence[InstancePlan],
        targets: Sequence[GroupedInstance],
        moves: RequestMoves,
    ) -> list[Any]:
        """Move the requests of an instance to others, and return those that none of them can hold."""
        page = max((self.resources.page_bytes(stage) for plan in before for stage in plan.stages), default=0)
        return moves.copy(
            source,
            targets,
            lambda target, pages: self.host.copy_pages(source, target, pages),
            lambda pages: pages * page / self.resources.link_rate,
        )


def _names(regroup: Regroup) -> set[str]:
    return {*regroup.before, *(plan.name for plan in regroup.after)}


def _totals(entries: Iterable[DeviceEntries]) -> Counter[int]:
    totals: Counter[int] = Counter()
    for by_device in entries:
        for device, sizes in by_device.items():
            totals[device] += sum(sizes.values())
    return totals
