"""The procedure that regroups instances: the rules for all kinds of regroups, on real and simulated devices.

    stage, while all instances serve -> rendezvous: move weights, KV and requests -> release

As `control.reconfigure`, it is a generator that yields waits to a driver. If anything fails, the instances that were to
end go on with all their requests.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from jaxserve.control.ledger import DeviceEntries, DeviceLedgers
from jaxserve.control.movement import movement
from jaxserve.control.plan import InstancePlan, PlanInForce
from jaxserve.control.reconfigure import SWAP_BUFFER, PlanFacts, Report
from jaxserve.control.regroup import Kind, Regroup, kind_of
from jaxserve.control.resources import Resources
from jaxserve.control.transitions import Outcome, PlannedCore, Rendezvous, Waits
from jaxserve.core.errors import JaxserveError
from jaxserve.kvcache import PagePool

log = logging.getLogger(__name__)

OWNER = "regroup"  # of the ledgers' entries of what is taken while instances are regrouped


class MovableCore(PlannedCore, Protocol):
    """What a regroup needs of an engine core."""

    def detach(self, request_ids: Collection[str] | None = None) -> list[Any]:
        """Take requests out, by default all, with everything that is known of them."""
        ...

    def attach(self, states: Sequence[Any], pages: Callable[[int], int] | None, now: float) -> None:
        """Go on with requests of another core, whose pages have other ids here; None: they are computed again."""
        ...


class GroupedInstance(Protocol):
    """An instance as a regroup sees it."""

    @property
    def core(self) -> MovableCore: ...


class InstanceHost(Protocol):
    """What makes, moves and ends instances, on real or simulated devices.

    Methods with `undo` put what reverses them there, so that an error in a later one changes nothing.
    """

    def instance(self, name: str) -> GroupedInstance:
        """Return an instance that serves."""
        ...

    def stage(self, plans: Sequence[InstancePlan], seconds: float) -> Waits[Mapping[str, Any]]:
        """Load what instances need on devices of their own, estimated to take `seconds`. Return it by their names."""
        ...

    def discard(self, staged: Mapping[str, Any]) -> None:
        """Free what was staged for instances that do not begin."""
        ...

    def open(self, plan: InstancePlan, staged: Any) -> GroupedInstance:
        """Return a new instance, without requests, on what was staged for it."""
        ...

    def merge(
        self, members: Sequence[Any], plan: InstancePlan, pages: PagePool, undo: ExitStack
    ) -> GroupedInstance:
        """Return an instance on the devices of its members, with their weights and KV, without requests.

        Page p of member i of n is page n p + i of the new one, whose pages are `pages`.
        """
        ...

    def split(
        self, whole: Any, plans: Sequence[InstancePlan], pages: Sequence[PagePool], undo: ExitStack
    ) -> Sequence[GroupedInstance]:
        """Return the instances that one becomes: the reverse of `merge`."""
        ...

    def move_pages(self, instance: Any, moves: Mapping[int, int]) -> None:
        """Copy pages of an instance (source: target)."""
        ...

    def copy_pages(self, source: Any, target: Any, pages: Mapping[int, int]) -> None:
        """Copy pages of an instance to pages of another one (source: target)."""
        ...

    def replace(self, before: Collection[str], after: Mapping[str, Any]) -> None:
        """Let instances step and take requests in the place of others, or raise and change nothing."""
        ...

    def release(self, ended: Sequence[Any]) -> Waits[None]:
        """Free what instances have left that do not serve any more."""
        ...


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

    def carry_out(self, regroups: Sequence[Regroup], report: Report) -> Waits[None]:
        """Carry out regroups in order, and report the outcome of each. After one that fails the rest is dropped."""
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
        kind = kind_of(before, regroup.after)
        self._book(before, regroup.after)
        staged: Mapping[str, Any] = {}
        ended: list[Any] = []
        try:
            if kind is Kind.COPY:
                staged = yield from self.host.stage(regroup.after, self._seconds(before, regroup.after))
            others = [plan.name for plan in self.in_force.plan.instances if plan.name not in regroup.before]
            stopped = (*regroup.before, *(others if kind is Kind.COPY and before else ()))
            commit = partial(self._commit, regroup, before, kind, staged, others, ended)
            yield Rendezvous(stopped, commit, lambda: self._seconds(before, regroup.after))
        except BaseException:
            self.host.discard(staged)
            self.ledgers.replace({OWNER: {}})
            raise
        yield from self.host.release(ended)
        gone: dict[str, DeviceEntries] = {plan.name: {} for plan in before}
        self.ledgers.replace(gone | {plan.name: self.entries(plan) for plan in regroup.after} | {OWNER: {}})

    def _book(self, before: Sequence[InstancePlan], after: Sequence[InstancePlan]) -> None:
        """Book what devices take while instances are regrouped beyond what those that end have booked."""
        old, new = _totals(map(self.entries, before)), _totals(map(self.entries, after))
        more = {device: size - old[device] for device, size in new.items() if size > old[device]}
        self.ledgers.replace({OWNER: {device: {SWAP_BUFFER: size} for device, size in more.items()}})

    def _seconds(self, before: Sequence[InstancePlan], after: Sequence[InstancePlan]) -> float:
        """Estimate how long weights and KV take to move."""
        rates = self.resources
        return movement(before, after, rates, self._live_pages(before)).seconds(
            rates.link_rate, rates.copy_rate, rates.memory_rate
        )

    def _live_pages(self, plans: Sequence[InstancePlan]) -> dict[str, int]:
        return {plan.name: self.host.instance(plan.name).core.scheduler.pages.used for plan in plans}

    # -- at the rendezvous

    def _commit(
        self,
        regroup: Regroup,
        before: Sequence[InstancePlan],
        kind: Kind,
        staged: Mapping[str, Any],
        others: Sequence[str],
        ended: list[Any],
    ) -> None:
        """Move everything and put the new instances in force, as a whole, or change nothing and raise.

        The instances that have ended are added to `ended`.
        """
        ending = [self.host.instance(plan.name) for plan in before]
        with ExitStack() as undo:
            if kind is Kind.MERGE:
                made = [self._merge(ending, regroup.after[0], undo)]
            elif kind is Kind.SPLIT:
                made = self._split(ending[0], regroup.after, undo)
            else:
                made = [self.host.open(plan, staged[plan.name]) for plan in regroup.after]
                self._move_requests(ending, [*made, *map(self.host.instance, others)], undo)
            expected = self.in_force.version + 1
            for plan, instance in zip(regroup.after, made, strict=True):
                instance.core.replan(*self.facts.of(plan, expected))
            self.host.replace(regroup.before, dict(zip([p.name for p in regroup.after], made, strict=True)))
            undo.pop_all()
        ended += ending
        version = self.in_force.regroup(regroup.before, regroup.after)
        if version != expected:  # other instances have changed meanwhile, for which nobody waits
            for plan, instance in zip(regroup.after, made, strict=True):
                instance.core.replan(*self.facts.of(plan, version))

    def _merge(self, members: Sequence[GroupedInstance], plan: InstancePlan, undo: ExitStack) -> GroupedInstance:
        count = len(members)
        taken = [_detach(member, self.now, undo) for member in members]
        limits = self.resources.of_degree(plan.tp)
        pages = PagePool.joined(
            [member.core.scheduler.pages for member in members], min_pages=limits.min_pages, max_pages=limits.max_pages
        )
        whole = self.host.merge(members, plan, pages, undo)
        for index, states in enumerate(taken):
            undo.callback(_rename, states, lambda page: page // count)
            whole.core.attach(states, lambda page, index=index: count * page + index, self.now())
        return whole


def _detach(instance: GroupedInstance, now: Callable[[], float], undo: ExitStack) -> list[Any]:
    """Take all requests out of an instance; to undo that, they are given back with the pages that they have then."""
    states = instance.core.detach()
    undo.callback(lambda: instance.core.attach(states, lambda page: page, now()))
    return states


def _rename(states: Sequence[Any], pages: Callable[[int], int]) -> None:
    for state in states:
        for sequence in state.sequences:
            sequence.pages = [pages(page) for page in sequence.pages]


def _totals(entries: Any) -> Counter[int]:
    totals: Counter[int] = Counter()
    for by_device in entries:
        for device, sizes in by_device.items():
            totals[device] += sum(sizes.values())
    return totals
