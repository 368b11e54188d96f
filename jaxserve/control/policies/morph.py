"""The morph policy: layers change to fewer bits under pressure, and their memory becomes KV pages (after MorphServe).

In an entry, layers change to fewer bits because pressure has lasted. In a release, they change back because pressure is
over and the trend of KV usage allows it. Each instance is decided by its own snapshot. Which layers have changed is
read from the plan in force, so that failed transitions need no special care.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from jaxserve.control.plan import InstancePlan
from jaxserve.control.policies.morph_settings import ACCURACY, MorphSettings
from jaxserve.control.policy import Proposal
from jaxserve.control.resources import Resources
from jaxserve.core.block_names import layer_name
from jaxserve.core.errors import ConfigError
from jaxserve.telemetry import Recent, Snapshot

NEVER = -math.inf


@dataclass(frozen=True)
class MorphState:
    """State of the policy for an instance. Times are seconds of the snapshots' clock."""

    initial: InstancePlan  # plan to return to
    pressure_since: float | None = None
    quiet_since: float | None = None
    last_entry: float = NEVER
    last_release: float = NEVER
    release_arrivals: float = 0.0  # arrivals/s at the last release
    peak_arrivals: float = 0.0  # largest arrivals/s since the last release
    first_entry: float | None = None  # time of the first entry since the last release
    relapse_arrivals: float = math.inf  # arrivals/s at a release that was a mistake
    relapse_time: float = NEVER  # when pressure returned after that release


@dataclass(frozen=True)
class _InstanceView:
    """An instance at one moment."""

    snapshot: Snapshot
    recent: Recent
    plan: InstancePlan

    @property
    def now(self) -> float:
        return self.snapshot.time

    @property
    def arrivals(self) -> float:
        return self.recent.arrivals_per_s or 0.0


class MorphPolicy:
    """A policy that swaps layers to fewer bits in `swap_order`, the least important first, and back in reverse."""

    def __init__(
        self,
        resources: Resources,
        swap_order: Sequence[int],
        settings: MorphSettings = ACCURACY,
        *,
        name: str = "morph",
    ):
        """Make the policy. Layers that are not in `swap_order` keep their precision.

        Raise `ConfigError` if `swap_order` names a layer twice, or one that cannot have the precisions of `settings`.
        """
        self.name, self.settings, self._resources = name, settings, resources
        self._order = tuple(layer_name(layer) for layer in swap_order)
        self._rank = {block: rank for rank, block in enumerate(self._order)}
        if len(self._rank) < len(self._order):
            raise ConfigError(f"the swap order names a layer twice: {list(swap_order)}")
        for block in self._order:
            for precision in settings.precisions:
                if precision not in resources.precisions(block):
                    known = resources.precisions(block)
                    allowed = f"choose from {', '.join(known)}" if known else "the model has no such layer"
                    raise ConfigError(f"{block} of the swap order cannot be {precision}: {allowed} (--variant)")

    @property
    def slo_ttft(self) -> float:
        """Objective for the time to the first token, in seconds."""
        return self.settings.slo_ttft

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions that layers change to."""
        return self.settings.precisions

    def init(self, plan: InstancePlan) -> MorphState:
        return MorphState(plan)

    def update(self, snapshot: Snapshot, plan: InstancePlan, state: MorphState) -> Proposal[MorphState]:
        assert snapshot.recent is not None, "the controller sets it"
        view = _InstanceView(snapshot, snapshot.recent, plan)
        return Proposal(*self._update(view, state))

    def foresee(self, plan: InstancePlan) -> Sequence[InstancePlan]:
        """Return the plans after one and two decisions, after an urgent one, and with all layers swapped."""
        settings = self.settings
        counts = {settings.entry_layers, 2 * settings.entry_layers, settings.urgent_layers, len(self._order)}
        plans = (plan.with_precisions(self._next_swaps(plan, plan, count)) for count in sorted(counts))
        return list(dict.fromkeys(plans))

    def _update(self, view: _InstanceView, state: MorphState) -> tuple[InstancePlan, MorphState, str]:
        """Return the next plan, the next state and the reason, which says what is waited for if the plan stays."""
        now, pressure = view.now, self._exceeded_thresholds(view.snapshot)
        state = replace(state, peak_arrivals=max(state.peak_arrivals, view.arrivals))
        if pressure:
            since = now if state.pressure_since is None else state.pressure_since
            state = replace(state, pressure_since=since, quiet_since=None)
            return self._enter(view, state, pressure)
        since = now if state.quiet_since is None else state.quiet_since
        return self._release(view, replace(state, pressure_since=None, quiet_since=since))

    # -- entry

    def _exceeded_thresholds(self, snapshot: Snapshot) -> list[str]:
        """Return the thresholds of pressure that are exceeded, as texts."""
        settings, exceeded = self.settings, []
        if snapshot.oldest_wait > settings.queue_delay:
            exceeded.append(f"queue delay {_ms(snapshot.oldest_wait)} > {_ms(settings.queue_delay)}")
        if snapshot.kv_usage > settings.kv_usage:
            exceeded.append(f"KV usage {snapshot.kv_usage:.1%} > {settings.kv_usage:.0%}")
        return exceeded

    def _enter(
        self, view: _InstanceView, state: MorphState, pressure: list[str]
    ) -> tuple[InstancePlan, MorphState, str]:
        settings, now, instance = self.settings, view.now, view.plan
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
        swaps, plan = self._entry_swaps(view, state.initial, count)
        pages = plan.kv_pages
        # Swaps that give no more pages still make steps faster, which helps only if there is a queue.
        for_speed = bool(swaps) and view.snapshot.oldest_wait > settings.queue_delay and pages == instance.kv_pages
        if pages <= instance.kv_pages and not for_speed:
            no_layer = f"no layer is left to go to {' or '.join(settings.precisions)}"
            obstacle = "more layers would give no more pages" if swaps else no_layer
            return view.plan, state, f"{', '.join(pressure)}: {obstacle}"
        state = replace(state, last_entry=now, first_entry=now if state.first_entry is None else state.first_entry)
        return plan, state, f"{', '.join(pressure)}: {_change_text(swaps, instance, pages)}"

    def _entry_swaps(
        self, view: _InstanceView, initial: InstancePlan, count: int
    ) -> tuple[dict[str, str], InstancePlan]:
        """Return the next `count` layers to swap, with their new precisions, and the plan with these swaps.

        More than `count` layers are swapped if the pools cannot grow otherwise, provided that pools grow by segments or
        that only pages are short (no sequence waits too long).
        """
        swaps, before = list(self._next_swaps(view.plan, initial, len(self._order)).items()), view.plan.kv_pages

        def swapped(count: int) -> InstancePlan:
            return self._plan_with_precisions(view, initial, dict(swaps[:count]))

        count = min(count, len(swaps))
        if self._resources.segments or view.snapshot.oldest_wait <= self.settings.queue_delay:
            counts = range(count, len(swaps) + 1)
            enough = bisect_left(counts, True, key=lambda n: swapped(n).kv_pages > before)
            count = counts[enough] if enough < len(counts) else count
        return dict(swaps[:count]), swapped(count)

    def _next_swaps(self, instance: InstancePlan, initial: InstancePlan, count: int) -> dict[str, str]:
        """Return the next layers of the swap order that may change, at most `count`, with their new precisions."""
        bytes_of, num_layers = self._resources.bytes_of, len(initial.layer_precisions)
        current, at_start = _precisions(instance), _precisions(initial)
        changed, swaps = len(self._changed_layers(instance, initial)), dict[str, str]()
        for block in self._order:
            precision = self.settings.precision_at(changed + len(swaps), num_layers)
            if len(swaps) == count or not precision:
                break
            unchanged = current[block] == at_start[block]
            if unchanged and bytes_of(block, precision) < bytes_of(block, at_start[block]):
                swaps[block] = precision
        return swaps

    # -- release

    def _release(self, view: _InstanceView, state: MorphState) -> tuple[InstancePlan, MorphState, str]:
        settings, now, initial = self.settings, view.now, state.initial
        if view.plan == initial:
            return view.plan, state, ""
        if (passed := now - state.last_release) < settings.release_interval:
            return view.plan, state, f"{passed:.1f} s after the last release < {settings.release_interval:g} s"
        state = self._with_relapse(state)
        if obstacle := self._release_obstacle(view, state) or self._relapse_obstacle(view, state):
            return view.plan, state, obstacle
        candidates = self._changed_layers(view.plan, initial)[::-1]
        max_count = min(len(candidates), math.ceil(settings.release_layers * len(initial.layer_precisions)))

        def restored(count: int) -> dict[str, str]:
            return {block: initial.precision(block) for block in candidates[:count]}

        @cache
        def plan_with(count: int) -> InstancePlan:
            return self._plan_with_precisions(view, initial, restored(count))

        # The more layers change back, the fewer pages remain. Find the largest count whose pages suffice.
        count = bisect_left(range(1, max_count + 1), True, key=lambda n: not self._fits(view, plan_with(n)))
        plan = plan_with(count)
        if plan is view.plan or not self._fits(view, plan):
            refused = plan_with(1) if plan is view.plan else plan
            return view.plan, state, self._usage_text(view, ">", refused.kv_pages)
        pages = plan.kv_pages
        calm = self._calm_text(view, state)
        reason = f"{calm}, {self._usage_text(view, '<=', pages)}: {_change_text(restored(count), view.plan, pages)}"
        if count < max_count:
            reason += f"; for more: {self._usage_text(view, '>', plan_with(count + 1).kv_pages)}"
        arrivals = view.arrivals
        state = replace(state, last_release=now, release_arrivals=arrivals, peak_arrivals=arrivals, first_entry=None)
        return plan, state, reason

    def _release_obstacle(self, view: _InstanceView, state: MorphState) -> str:
        """Return why no layer may change back yet, as a text; "" if there is no obstacle."""
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
        # Pressure while transitions were under way, when no policy was asked.
        if recent.max_wait > settings.queue_delay:
            return f"queue delay {window}: {_ms(recent.max_wait)} > {_ms(settings.queue_delay)}"
        if recent.max_kv_usage > settings.kv_usage:
            return f"KV usage {window}: {recent.max_kv_usage:.1%} > {settings.kv_usage:.0%}"
        return ""

    def _calm_text(self, view: _InstanceView, state: MorphState) -> str:
        """Return why layers may change back, as a text."""
        settings, recent = self.settings, view.recent
        assert state.quiet_since is not None
        return (
            f"quiet for {view.now - state.quiet_since:.1f} s >= {settings.release_quiet:g} s, nothing waiting, "
            f"mean queue {recent.waiting:.1f} <= {settings.release_waiting:g}, "
            f"no preemption in {recent.seconds:.0f} s"
        )

    def _relapse_obstacle(self, view: _InstanceView, state: MorphState) -> str:
        """Return why an earlier relapse forbids a release, as a text; "" after a long time or for a lower load."""
        settings, past = self.settings, view.now - state.relapse_time
        if past > settings.relapse_memory or view.arrivals <= settings.relapse_load * state.relapse_arrivals:
            return ""
        limit = f"{settings.relapse_load:.0%} of {state.relapse_arrivals:.1f}"
        remaining = settings.relapse_memory - past
        until = "" if remaining == math.inf else f", for {remaining:.0f} s more"
        return f"held after a relapse: {view.arrivals:.1f} arrivals/s > {limit}{until}"

    def _with_relapse(self, state: MorphState) -> MorphState:
        """Return the state with a relapse noted, if pressure returned soon after the last release.

        It is not a relapse if arrivals have grown so much that the release was not the cause.
        """
        settings = self.settings
        if state.first_entry is None or state.first_entry - state.last_release > settings.relapse:
            return state
        if state.release_arrivals == 0 or state.peak_arrivals > settings.relapse_rise * state.release_arrivals:
            return state
        return replace(state, relapse_arrivals=state.release_arrivals, relapse_time=state.first_entry)

    def _fits(self, view: _InstanceView, plan: InstancePlan) -> bool:
        """Return whether the KV pages in use fit into a plan with the margin: on average, now, and at the horizon."""
        pages = plan.kv_pages
        if pages >= view.plan.kv_pages:
            return True
        usage = max(self._kv_usages(view).values())
        return usage * view.snapshot.kv_pages_total <= self.settings.release_usage * (pages - 1)

    def _kv_usages(self, view: _InstanceView) -> dict[str, float]:
        """Return shares of the present KV pages that a smaller pool must hold, by a text that says when."""
        snapshot, recent, horizon = view.snapshot, view.recent, self.settings.release_horizon
        rise = max(0.0, recent.kv_trend or 0.0) * horizon
        now = snapshot.kv_usage
        return {"in use": now, "in use on average": recent.kv_usage, f"in use in {horizon:g} s": now + rise}

    def _usage_text(self, view: _InstanceView, relation: str, pages: int) -> str:
        """Return a text that compares the largest usage with the margin of a pool of `pages`."""
        usages = self._kv_usages(view)
        when = max(usages, key=lambda text: usages[text])
        used = usages[when] * view.snapshot.kv_pages_total
        return f"{used:.0f} pages {when} {relation} {self.settings.release_usage:.0%} of {pages - 1}"

    # -- plans

    def _changed_layers(self, instance: InstancePlan, initial: InstancePlan) -> list[str]:
        """Return the layers that differ from the initial plan, in swap order; layers outside that order come last."""
        at_start, last = _precisions(initial), len(self._order)
        changed = (block for block, precision in _precisions(instance).items() if precision != at_start[block])
        return sorted(changed, key=lambda block: self._rank.get(block, last))

    def _plan_with_precisions(
        self, view: _InstanceView, initial: InstancePlan, precisions: dict[str, str]
    ) -> InstancePlan:
        """Return the plan with these precisions and the KV pages that then fit, or `view.plan` if nothing changes."""
        plan = view.plan.with_precisions(precisions)
        pages = self._resources.kv_capacity(plan) if self._changed_layers(plan, initial) else initial.kv_pages
        plan = plan.with_kv_pages(pages)
        return view.plan if plan == view.plan else plan


def _precisions(instance: InstancePlan) -> dict[str, str]:
    return {block.block: block.precision for block in instance.blocks}


def _change_text(swaps: Mapping[str, str], instance: InstancePlan, pages: int) -> str:
    """Return what a decision changes, as a text such as "layers 3, 7 to int4, KV 800 -> 960 pages"."""
    parts = []
    for precision in dict.fromkeys(swaps.values()):
        layers = [block.removeprefix("layers.") for block, after in swaps.items() if after == precision]
        parts.append(f"layer{'s' if len(layers) > 1 else ''} {', '.join(layers)} to {precision}")
    if pages != instance.kv_pages:
        parts.append(f"KV {instance.kv_pages} -> {pages} pages")
    return ", ".join(parts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
