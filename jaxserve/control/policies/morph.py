"""morph: layers change to fewer bits under pressure, their memory becomes KV pages, and all comes back (MorphServe).

Entry follows the level of pressure, release its trend. What each instance does depends on its own snapshot alone. How
far it has gone is read off the plan in force, so that failed transitions need no care.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.policies.morph_settings import ACCURACY, MorphSettings
from jaxserve.control.policy import Proposal
from jaxserve.control.resources import Resources
from jaxserve.core.block_names import layer_name
from jaxserve.core.errors import ConfigError
from jaxserve.telemetry import Recent, Snapshot

NEVER = -math.inf


@dataclass(frozen=True)
class InstanceState:
    """What the policy remembers of one instance; times are seconds of the snapshots' clock."""

    home: InstancePlan  # to return to
    pressure_since: float | None = None
    quiet_since: float | None = None
    last_entry: float = NEVER
    last_release: float = NEVER
    released_at: float = 0.0  # arrivals/s at the last release
    peak: float = 0.0  # arrivals/s since then
    returned: float | None = None  # time of the first entry since then
    ceiling: float = math.inf  # arrivals/s that were too many for a release
    learned: float = NEVER  # time when that showed


MorphState = tuple[InstanceState, ...]


@dataclass(frozen=True)
class _View:
    """One instance at one moment."""

    snapshot: Snapshot
    recent: Recent
    number: int
    plan: Plan

    @property
    def now(self) -> float:
        return self.snapshot.time

    @property
    def arrivals(self) -> float:
        return self.recent.arrivals_per_s or 0.0

    @property
    def instance(self) -> InstancePlan:
        return self.plan.instances[self.number]


class MorphPolicy:
    """Swaps layers in `swap_order`, the least important first, and back in reverse."""

    def __init__(
        self,
        resources: Resources,
        swap_order: Sequence[int],
        settings: MorphSettings = ACCURACY,
        *,
        name: str = "morph",
    ):
        """Layers that are not in `swap_order` keep their precision. Raises `ConfigError` for layers that are not
        there, or named twice, or that cannot have the precision of the settings.
        """
        self.name, self.settings, self._resources = name, settings, resources
        self._order = tuple(layer_name(layer) for layer in swap_order)
        self._rank = {block: place for place, block in enumerate(self._order)}
        if len(self._rank) < len(self._order):
            raise ConfigError(f"the swap order names a layer twice: {list(swap_order)}")
        for block in self._order:
            for precision in settings.precisions:
                if precision not in resources.precisions(block):
                    known = ", ".join(resources.precisions(block)) or "none: there is no such layer"
                    raise ConfigError(f"{block} of the swap order cannot be {precision}; there are {known} (--variant)")

    @property
    def slo_ttft(self) -> float:
        """Seconds to the first token that the thresholds are meant to keep."""
        return self.settings.slo_ttft

    def init(self, plan: Plan) -> MorphState:
        return tuple(InstanceState(instance) for instance in plan.instances)

    def update(self, snapshots: Sequence[Snapshot], plan: Plan, state: MorphState) -> Proposal[MorphState]:
        states: list[InstanceState] = []
        reasons: list[str] = []
        notes: list[str] = []  # of the instances that wait for something
        for number, (snapshot, before) in enumerate(zip(snapshots, state, strict=True)):
            assert snapshot.recent is not None, "the controller fills it"
            view = _View(snapshot, snapshot.recent, number, plan)
            plan, after, words = self._update_instance(view, before)
            states.append(after)
            if words:
                told = notes if plan is view.plan else reasons
                told.append(f"instance {number}: {words}" if len(snapshots) > 1 else words)
        return Proposal(plan, tuple(states), "; ".join(reasons or notes))

    def foresee(self, plan: Plan) -> Sequence[Plan]:
        """After the first two decisions, after an urgent one, and with all layers swapped that may be: where load leads
        that lasts.
        """
        settings, most = self.settings, len(self._order)
        counts = {settings.entry_layers, 2 * settings.entry_layers, settings.urgent_layers, most}
        return list(dict.fromkeys(self._with_swapped(plan, count) for count in sorted(counts)))

    def _with_swapped(self, plan: Plan, count: int) -> Plan:
        """The plan at the start with the first layers of the order swapped, as many as the mode allows."""
        version = plan.version
        for number, home in enumerate(plan.instances):
            plan = plan.with_precisions(number, self._next_swaps(home, home, count))
        return replace(plan, version=version)

    def _update_instance(self, view: _View, state: InstanceState) -> tuple[Plan, InstanceState, str]:
        """The next plan, the next state, and why; of the same plan, what is waited for."""
        now, pressure = view.now, self._pressure(view.snapshot)
        state = replace(state, peak=max(state.peak, view.arrivals))
        if pressure:
            since = now if state.pressure_since is None else state.pressure_since
            state = replace(state, pressure_since=since, quiet_since=None)
            return self._enter(view, state, pressure)
        since = now if state.quiet_since is None else state.quiet_since
        return self._release(view, replace(state, pressure_since=None, quiet_since=since))

    # -- entry

    def _pressure(self, snapshot: Snapshot) -> list[str]:
        """The thresholds that are exceeded, in words."""
        settings, found = self.settings, []
        if snapshot.oldest_wait > settings.queue_delay:
            found.append(f"queue delay {_ms(snapshot.oldest_wait)} > {_ms(settings.queue_delay)}")
        if snapshot.kv_usage > settings.kv_usage:
            found.append(f"KV usage {snapshot.kv_usage:.1%} > {settings.kv_usage:.0%}")
        return found

    def _enter(self, view: _View, state: InstanceState, pressure: list[str]) -> tuple[Plan, InstanceState, str]:
        settings, now, instance = self.settings, view.now, view.instance
        assert state.pressure_since is not None
        if (lasted := now - state.pressure_since) < settings.entry_hold:
            return view.plan, state, f"pressure for {lasted:.1f} s < {settings.entry_hold:g} s"
        if (passed := now - state.last_entry) < settings.entry_interval:
            return view.plan, state, f"pressure, {passed:.1f} s after the last entry < {settings.entry_interval:g} s"
        urgent_after = settings.urgent_delay * settings.slo_ttft
        count = settings.entry_layers
        if view.snapshot.oldest_wait >= urgent_after:
            count = max(count, settings.urgent_layers)
            pressure = [*pressure, f"near the SLO (from {_ms(urgent_after)})"]
        swaps, plan = self._entered(view, state.home, count)
        pages = plan.instances[view.number].kv_pages
        faster = bool(swaps) and view.snapshot.oldest_wait > settings.queue_delay and pages == instance.kv_pages
        if pages <= instance.kv_pages and not faster:  # with no more pages to be had, only a queue is a reason
            no_layer = f"no layer is left to go to {' or '.join(settings.precisions)}"
            left = "more layers would give no more pages" if swaps else no_layer
            return view.plan, state, f"{', '.join(pressure)}: {left}"
        state = replace(state, last_entry=now, returned=now if state.returned is None else state.returned)
        return plan, state, f"{', '.join(pressure)}: {_change(swaps, instance, pages)}"

    def _entered(self, view: _View, home: InstancePlan, count: int) -> tuple[dict[str, str], Plan]:
        """The precisions that the next layers of the order get, and the plan with them: so many layers, or, where pools
        grow by segments, and where pages alone are wanted, as many more as the pools need to grow, if that can be had.
        """
        swaps, before = list(self._next_swaps(view.instance, home, len(self._order)).items()), view.instance.kv_pages

        def swapped(count: int) -> Plan:
            return self._swapped(view, home, dict(swaps[:count]))

        count = min(count, len(swaps))
        if self._resources.segments or view.snapshot.oldest_wait <= self.settings.queue_delay:
            counts = range(count, len(swaps) + 1)
            more = bisect_left(counts, True, key=lambda count: swapped(count).instances[view.number].kv_pages > before)
            count = counts[more] if more < len(counts) else count
        return dict(swaps[:count]), swapped(count)

    def _next_swaps(self, instance: InstancePlan, home: InstancePlan, count: int) -> dict[str, str]:
        """The next layers of the swap order and the precisions that they get, as many as the mode allows."""
        bytes_of, num_layers = self._resources.bytes_of, len(home.layer_precisions)
        now, then = _precisions(instance), _precisions(home)
        changed, swaps = len(self._away(instance, home)), dict[str, str]()
        for block in self._order:
            precision = self.settings.precision_at(changed + len(swaps), num_layers)
            if len(swaps) == count or not precision:
                break
            if now[block] == then[block] and bytes_of(block, precision) < bytes_of(block, then[block]):
                swaps[block] = precision
        return swaps

    # -- release

    def _release(self, view: _View, state: InstanceState) -> tuple[Plan, InstanceState, str]:
        settings, now, home = self.settings, view.now, state.home
        if view.instance == home:
            return view.plan, state, ""
        if (passed := now - state.last_release) < settings.release_interval:
            return view.plan, state, f"{passed:.1f} s after the last release < {settings.release_interval:g} s"
        state = self._learn(state)
        if held := self._unrest(view, state) or self._relapsed(view, state):
            return view.plan, state, held
        back = self._away(view.instance, home)[::-1]
        most = min(len(back), math.ceil(settings.release_layers * len(home.layer_precisions)))

        def restored(count: int) -> dict[str, str]:
            return {block: home.precision(block) for block in back[:count]}

        @cache
        def with_back(count: int) -> Plan:
            return self._swapped(view, home, restored(count))

        # The more layers are back, the fewer pages are left: the most that fit.
        count = bisect_left(range(1, most + 1), True, key=lambda count: not self._fits(view, with_back(count)))
        plan = with_back(count)
        if plan is view.plan or not self._fits(view, plan):
            least = with_back(1) if plan is view.plan else plan
            return view.plan, state, self._in_use(view, ">", least.instances[view.number].kv_pages)
        pages = plan.instances[view.number].kv_pages
        calm = self._calm(view, state)
        reason = f"{calm}, {self._in_use(view, '<=', pages)}: {_change(restored(count), view.instance, pages)}"
        if count < most:
            reason += f"; for more: {self._in_use(view, '>', with_back(count + 1).instances[view.number].kv_pages)}"
        load = view.arrivals
        return plan, replace(state, last_release=now, released_at=load, peak=load, returned=None), reason

    def _unrest(self, view: _View, state: InstanceState) -> str:
        """What holds layers back as long as it lasts, in words; nothing if they may come back."""
        settings, recent = self.settings, view.recent
        window = f"in the last {recent.seconds:.0f} s"
        assert state.quiet_since is not None
        if (quiet := view.now - state.quiet_since) < settings.release_quiet:
            return f"quiet for {quiet:.1f} s < {settings.release_quiet:g} s"
        if view.snapshot.num_waiting:
            return f"{view.snapshot.num_waiting} waiting > 0"
        if recent.preemptions:
            return f"preemptions {window}: {recent.preemptions} > 0"
        if recent.waiting > settings.release_waiting:
            return f"mean queue {recent.waiting:.1f} > {settings.release_waiting:g}"
        # Pressure while layers were on their way: nobody was asked then.
        if recent.max_wait > settings.queue_delay:
            return f"queue delay {window}: {_ms(recent.max_wait)} > {_ms(settings.queue_delay)}"
        if recent.max_kv_usage > settings.kv_usage:
            return f"KV usage {window}: {recent.max_kv_usage:.1%} > {settings.kv_usage:.0%}"
        return ""

    def _calm(self, view: _View, state: InstanceState) -> str:
        """Why layers may come back, in words."""
        settings, recent = self.settings, view.recent
        assert state.quiet_since is not None
        return (
            f"quiet for {view.now - state.quiet_since:.1f} s >= {settings.release_quiet:g} s, nothing waiting, "
            f"mean queue {recent.waiting:.1f} <= {settings.release_waiting:g}, "
            f"no preemption in {recent.seconds:.0f} s"
        )

    def _relapsed(self, view: _View, state: InstanceState) -> str:
        """What was learnt and holds layers back, in words; nothing if it is forgotten, or if load has fallen."""
        settings, past = self.settings, view.now - state.learned
        if past > settings.relapse_memory or view.arrivals <= settings.relapse_load * state.ceiling:
            return ""
        limit = f"{settings.relapse_load:.0%} of {state.ceiling:.1f}"
        left = settings.relapse_memory - past
        until = "" if left == math.inf else f", for {left:.0f} s more"
        return f"held after a relapse: {view.arrivals:.1f} arrivals/s > {limit}{until}"

    def _learn(self, state: InstanceState) -> InstanceState:
        """If pressure came back soon after the last release though little more arrived, that was too much already."""
        settings = self.settings
        if state.returned is None or state.returned - state.last_release > settings.relapse:
            return state
        if state.released_at == 0 or state.peak > settings.relapse_rise * state.released_at:
            return state
        return replace(state, ceiling=state.released_at, learned=state.returned)

    def _fits(self, view: _View, plan: Plan) -> bool:
        """Whether what is in use fits into a plan's pages with the margin: on average, now, and at the horizon."""
        pages = plan.instances[view.number].kv_pages
        if pages >= view.instance.kv_pages:
            return True
        usage = max(self._usages(view).values())
        return usage * view.snapshot.kv_pages_total <= self.settings.release_usage * (pages - 1)

    def _usages(self, view: _View) -> dict[str, float]:
        """Shares of the KV pages that are to fit into fewer, by when they are in use."""
        snapshot, recent, horizon = view.snapshot, view.recent, self.settings.release_horizon
        rise = max(0.0, recent.kv_trend or 0.0) * horizon
        now = snapshot.kv_usage
        return {"in use": now, "in use on average": recent.kv_usage, f"in use in {horizon:g} s": now + rise}

    def _in_use(self, view: _View, relation: str, pages: int) -> str:
        """What decides whether so many pages are enough, in words: the largest use, beside what the margin leaves."""
        usages = self._usages(view)
        when = max(usages, key=lambda when: usages[when])
        used = usages[when] * view.snapshot.kv_pages_total
        return f"{used:.0f} pages {when} {relation} {self.settings.release_usage:.0%} of {pages - 1}"

    # -- plans

    def _away(self, instance: InstancePlan, home: InstancePlan) -> list[str]:
        """Layers that differ from home, in the order in which they are swapped; others' doing comes last."""
        then, last = _precisions(home), len(self._order)
        changed = (block for block, precision in _precisions(instance).items() if precision != then[block])
        return sorted(changed, key=lambda block: self._rank.get(block, last))

    def _swapped(self, view: _View, home: InstancePlan, precisions: dict[str, str]) -> Plan:
        """The plan with these precisions, and the KV pages that then fit; the same plan if nothing changes."""
        plan = view.plan.with_precisions(view.number, precisions)
        instance = plan.instances[view.number]
        pages = self._resources.kv_capacity(instance) if self._away(instance, home) else home.kv_pages
        plan = plan.with_kv_pages(view.number, pages)
        return view.plan if plan.instances == view.plan.instances else plan


def _precisions(instance: InstancePlan) -> dict[str, str]:
    return {block.block: block.precision for block in instance.blocks}


def _change(swaps: Mapping[str, str], instance: InstancePlan, pages: int) -> str:
    """What a decision changes, in words: "layers 3, 7 to int4, KV 800 -> 960 pages"."""
    parts = []
    for precision in dict.fromkeys(swaps.values()):
        numbers = [block.removeprefix("layers.") for block, after in swaps.items() if after == precision]
        parts.append(f"layer{'s' if len(numbers) > 1 else ''} {', '.join(numbers)} to {precision}")
    if pages != instance.kv_pages:
        parts.append(f"KV {instance.kv_pages} -> {pages} pages")
    return ", ".join(parts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
