"""The morph policy: layers change to fewer bits under pressure, and their memory becomes KV pages (after MorphServe).

An instance is on a level of its `Ladder`. An entry climbs it, because pressure has lasted, the load is not expected to
be served in time, and the estimates say that a higher level serves it better. A release descends, because pressure is
over and the trends of KV usage and load allow it, or because the level has turned out not to help.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxserve.control.capacity import Workload
from jaxserve.control.plan import InstancePlan
from jaxserve.control.policies.ladder import Ladder, Loss
from jaxserve.control.policies.morph_settings import ACCURACY, MorphSettings
from jaxserve.control.policy import Proposal
from jaxserve.control.resources import Resources
from jaxserve.core.block_names import layer_name
from jaxserve.core.errors import ConfigError
from jaxserve.telemetry import Snapshot

NEVER = -math.inf
START = Snapshot()  # before the first step
WORKLOAD_WINDOW = 30.0  # s; the workload is that of the last one to two windows
EVIDENCE = 2.0  # s of steps from which the estimates are corrected
EXHAUSTION = 2.0  # s; pages that are expected to last longer are not short
HARM = 1.15  # factor on the time to start at which full precision is taken to be the better one
AT_RISK = 0.25  # share of `slo_ttft` after which a waiting sequence lifts the limit on sequences
NO_SLOWER = 1.1  # factor on the time per token up to which steps count as no slower
HEADROOM = 1.2  # factor on the load that a limit on sequences leaves room for
LIMIT_INTERVAL = 5.0  # s that pass before another limit on sequences, unless it is lifted


@dataclass(frozen=True)
class MorphState:
    """State of the policy for an instance. Times are seconds of the snapshots' clock."""

    ladder: Ladder
    plan: InstancePlan  # that was in force when the policy was asked last
    level: int = 0  # of `plan`
    planned: Snapshot = START  # when `level` was reached
    older: Snapshot = START  # the begin of the workload's window
    newer: Snapshot = START  # the begin of the next window
    # Seconds that steps took, as a multiple of what was expected; None if that is not known.
    at_home: float | None = None  # on level 0
    away: float | None = None  # on other levels
    away_time: float = NEVER  # when `away` was measured
    pressure_since: float | None = None
    quiet_since: float | None = None
    last_entry: float = NEVER
    last_release: float = NEVER
    last_limit: float = NEVER
    leaving: bool = False  # fewer sequences run, until the pages in use fit into full precision's
    release_arrivals: float = 0.0  # arrivals/s at the last release
    peak_arrivals: float = 0.0  # largest arrivals/s since the last release
    first_entry: float | None = None  # time of the first entry since the last release
    relapse_arrivals: float = math.inf  # arrivals/s at a release that was a mistake
    relapse_time: float = NEVER  # when pressure returned after that release


@dataclass(frozen=True)
class _Load:
    """What an instance has to serve, and how well each level would serve it."""

    ladder: Ladder
    workload: Workload
    running: int  # sequences
    waiting: int  # sequences that wait, or are expected to
    tokens_per_s: float  # generated tokens that the arriving sequences ask for
    level: int  # the present one
    biases: tuple[float, float]  # seconds of steps as multiples of those expected, on level 0 and on other levels

    def room(self, level: int) -> int:
        """Return how many sequences a level has room for: at least what runs now, if it has as many pages."""
        room = self.ladder.capacity(level).sequences(self.workload)
        more = self.ladder.plan(level).kv_pages >= self.ladder.plan(self.level).kv_pages
        return max(room, self.running) if more else room

    def most(self, level: int) -> float:
        """Return the tokens/s of a level while it is full."""
        return self.room(level) / self.seconds_per_token(level, self.room(level))

    def seconds_to_start(self, level: int) -> float:
        """Return the time (s) until the last waiting sequence has its first token on a level."""
        capacity = self.ladder.capacity(level)
        seconds = capacity.seconds_to_start(self.workload, self.running, self.waiting, self.room(level))
        return seconds * self.biases[level > 0]

    def keeps_up(self, level: int) -> bool:
        """Return whether a level serves what arrives, or at least no less of it than the present level does.

        Room for more sequences does not outlast a load that a level serves more slowly.
        """
        return self.most(level) >= min(self.tokens_per_s, self.most(self.level))

    def slowdown(self, level: int) -> float:
        """Return the factor by which tokens of the sequences that run take longer on a level."""
        running = max(1, self.running)
        return self.seconds_per_token(level, running) / self.seconds_per_token(self.level, running)

    def seconds_per_token(self, level: int, sequences: int) -> float:
        """Return the time (s) between two tokens of a sequence while `sequences` run."""
        speed = self.ladder.capacity(level).tokens_per_s(self.workload, sequences)
        return sequences / speed * self.biases[level > 0]


Answer = tuple[InstancePlan, MorphState, str]


class MorphPolicy:
    """A policy that climbs and descends a `Ladder` of precisions."""

    def __init__(
        self,
        resources: Resources,
        swap_order: Sequence[int],
        settings: MorphSettings = ACCURACY,
        *,
        name: str = "morph",
        loss: Loss | None = None,
    ):
        """Make the policy. Layers that are not in `swap_order` keep their precision.

        `loss` returns the loss of quality that `settings.max_quality_loss` limits. Raise `ConfigError` if `swap_order`
        names a layer twice, or one that cannot have the precisions of `settings`.
        """
        self.name, self.settings, self._resources = name, settings, resources
        self._order, self._loss = tuple(swap_order), loss
        if len(set(self._order)) < len(self._order):
            raise ConfigError(f"the swap order names a layer twice: {list(swap_order)}")
        for block in map(layer_name, self._order):
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
    def slo_tpot(self) -> float | None:
        """Objective for the time per output token in seconds, or None."""
        return self.settings.slo_tpot if self.settings.slo_tpot < math.inf else None

    @property
    def max_quality_loss(self) -> float | None:
        """Largest rise of the cross-entropy that may be expected, as a share of full precision's, or None."""
        return self.settings.max_quality_loss if self.settings.max_quality_loss < math.inf else None

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions that layers change to."""
        return self.settings.precisions

    def init(self, plan: InstancePlan) -> MorphState:
        return MorphState(Ladder(plan, self._resources, self._order, self.settings, self._loss), plan)

    def update(self, snapshot: Snapshot, plan: InstancePlan, state: MorphState) -> Proposal[MorphState]:
        """Return the next plan, the next state and the reason, which says what is waited for if the plan stays."""
        if plan is not state.plan or snapshot.time - state.newer.time > WORKLOAD_WINDOW:
            state = self._observed(snapshot, plan, state)
        pressure = self._exceeded_thresholds(snapshot)
        if not pressure and not state.level:
            if state.pressure_since is not None:
                state = replace(state, pressure_since=None)
            return self._at_home(snapshot, plan, state)
        assert snapshot.recent is not None, "the controller sets it"
        now = snapshot.time
        state = replace(state, peak_arrivals=max(state.peak_arrivals, snapshot.recent.arrivals_per_s or 0.0))
        if pressure:
            since = now if state.pressure_since is None else state.pressure_since
            state = replace(state, pressure_since=since, quiet_since=None)
            answer = self._enter(snapshot, plan, state, pressure)
        else:
            since = now if state.quiet_since is None else state.quiet_since
            answer = self._release(snapshot, plan, replace(state, pressure_since=None, quiet_since=since))
        return Proposal(*answer)

    def foresee(self, plan: InstancePlan) -> Sequence[InstancePlan]:
        """Return the plans after one and two decisions, after an urgent one, and with all first changes made."""
        ladder, settings = self.init(plan).ladder, self.settings
        counts = {settings.entry_layers, 2 * settings.entry_layers, settings.urgent_layers, len(self._order)}
        levels = sorted({min(count, ladder.top) for count in counts} - {0})
        return [ladder.plan(level).with_kv_pages(plan.kv_pages) for level in levels]

    # -- what is known

    def _observed(self, snapshot: Snapshot, plan: InstancePlan, state: MorphState) -> MorphState:
        """Return the state with what the steps since the plan came into force have taught, and the present plan."""
        state = self._with_biases(snapshot, state)
        if plan is not state.plan:
            # As the same instance may come back as another object, it is compared only when it has changed.
            home = plan == state.ladder.initial
            level = 0 if home else state.ladder.level_of(plan)
            if level != state.level:
                state = replace(state, level=level, planned=snapshot, leaving=False)
            state = replace(state, plan=plan)
        if snapshot.time - state.newer.time > WORKLOAD_WINDOW:
            state = replace(state, older=state.newer, newer=snapshot)
        return state

    def _with_biases(self, snapshot: Snapshot, state: MorphState) -> MorphState:
        expected = snapshot.expected_seconds - state.planned.expected_seconds
        if expected < EVIDENCE:
            return state
        bias = (snapshot.busy_seconds - state.planned.busy_seconds) / expected
        if not state.level:
            return replace(state, at_home=bias)
        return replace(state, away=bias, away_time=snapshot.time)

    def _load(self, snapshot: Snapshot, state: MorphState) -> _Load:
        """Return what the instance has to serve, with estimates that the steps so far have corrected."""
        assert snapshot.recent is not None
        state = self._with_biases(snapshot, state)
        workload = Workload.between(state.older, snapshot, self._resources.page_size)
        at_home = 1.0 if state.at_home is None else state.at_home
        away = at_home
        if state.away is not None and snapshot.time - state.away_time <= self.settings.relapse_memory:
            away = state.away
        elif state.at_home is None and state.away is not None:
            at_home = away = state.away
        running, waiting = snapshot.num_running, snapshot.num_waiting
        arrivals = snapshot.recent.arrivals_per_s or 0.0
        growth = self._expected_usage(snapshot) / max(snapshot.kv_usage, 1e-9) if snapshot.kv_usage else 1.0
        waiting = max(waiting, math.ceil(running * min(growth, 2.0)) - running)
        biases = (at_home, away)
        return _Load(state.ladder, workload, running, waiting, arrivals * workload.answer, state.level, biases)

    def _expected_usage(self, snapshot: Snapshot) -> float:
        """Return the share of the KV pages in use when `EXHAUSTION` seconds have passed as the last ones did."""
        assert snapshot.recent is not None
        return snapshot.kv_usage + EXHAUSTION * max(0.0, snapshot.recent.kv_trend or 0.0)

    # -- entry

    def _exceeded_thresholds(self, snapshot: Snapshot) -> list[str]:
        """Return the thresholds of pressure that are exceeded, as texts."""
        settings, exceeded = self.settings, []
        if snapshot.oldest_wait > settings.queue_delay:
            exceeded.append(f"queue delay {_ms(snapshot.oldest_wait)} > {_ms(settings.queue_delay)}")
        if snapshot.kv_usage > settings.kv_usage:
            exceeded.append(f"KV usage {snapshot.kv_usage:.1%} > {settings.kv_usage:.0%}")
        if (
            settings.slo_tpot < math.inf
            and (tpot := (snapshot.recent and snapshot.recent.tpot) or 0) > settings.slo_tpot
        ):
            exceeded.append(f"TPOT {_ms(tpot)} > {_ms(settings.slo_tpot)}")
        return exceeded

    def _enter(self, snapshot: Snapshot, plan: InstancePlan, state: MorphState, pressure: list[str]) -> Answer:
        settings, now, ladder = self.settings, snapshot.time, state.ladder
        text = ", ".join(pressure)
        assert state.pressure_since is not None
        if (lasted := now - state.pressure_since) < settings.entry_hold:
            return plan, state, f"{text} for {lasted:.1f} s < {settings.entry_hold:g} s"
        load = self._load(snapshot, state)
        if state.level and (answer := self._leave_if_harmful(snapshot, plan, state, load)):
            return answer
        if (passed := now - state.last_entry) < settings.entry_interval:
            return plan, state, f"{text}, {passed:.1f} s after the last entry < {settings.entry_interval:g} s"
        if obstacle := self._no_need(snapshot, load):
            return self._limited(snapshot, plan, state, load, f"{text}, but {obstacle}")
        level = self._better_level(snapshot, load)
        if level == state.level:
            left = "no change is left" if level == ladder.top else "no change is expected to help"
            return self._limited(snapshot, plan, state, load, f"{text}: {left}")
        wanted = ladder.plan(level).with_max_num_seqs(self._limit(snapshot, state, load, level))
        state = replace(state, last_entry=now, last_limit=now)
        state = replace(state, first_entry=now if state.first_entry is None else state.first_entry)
        start = _ms(snapshot.oldest_wait + load.seconds_to_start(level))
        return wanted, state, f"{text}, {self._need(snapshot, load)}: {_change_text(plan, wanted)}; then within {start}"

    def _no_need(self, snapshot: Snapshot, load: _Load) -> str:
        """Return why the plan in force is expected to hold the objectives, as a text; "" if it is not."""
        settings = self.settings
        limit = settings.hold * settings.slo_ttft
        recent = snapshot.recent
        assert recent is not None
        if recent.tpot is not None and recent.tpot > settings.slo_tpot:
            return ""
        if snapshot.num_waiting:
            start = max(snapshot.oldest_wait, 0.0) + load.seconds_to_start(load.level)
            behind = load.tokens_per_s > load.most(load.level)
            if start >= limit or (behind and start >= limit / 2):
                return ""
            return f"the last of {snapshot.num_waiting} waiting is expected to start within {_ms(start)} < {_ms(limit)}"
        usage = self._expected_usage(snapshot)
        if usage < 1.0 and not recent.preemptions:
            return f"nothing waits, and {usage:.0%} of the pages are expected to be in use in {EXHAUSTION:g} s"
        return ""

    def _need(self, snapshot: Snapshot, load: _Load) -> str:
        """Return why the plan in force is not expected to hold the objectives, as a text."""
        if snapshot.num_waiting:
            start = snapshot.oldest_wait + load.seconds_to_start(load.level)
            return f"the last of {snapshot.num_waiting} waiting is expected to start within {_ms(start)}"
        return f"{self._expected_usage(snapshot):.0%} of the pages are expected to be in use in {EXHAUSTION:g} s"

    def _better_level(self, snapshot: Snapshot, load: _Load) -> int:
        """Return the lowest level that is expected to serve the load in time, or else the one that serves it soonest.

        The levels that are tried are further and further up. Return the present level if none is enough of a gain.
        """
        settings, top, waited = self.settings, load.ladder.top, snapshot.oldest_wait
        urgent = waited >= settings.urgent_delay * settings.slo_ttft
        count = settings.urgent_layers if urgent else settings.entry_layers
        best, soonest = load.level, load.seconds_to_start(load.level) / settings.min_gain
        while load.level < top:
            level = min(load.level + count, top)
            start = load.seconds_to_start(level)
            # Slower steps for the sequences that run are a price for those that wait, but not for those expected to.
            worth_it = snapshot.num_waiting or load.slowdown(level) <= NO_SLOWER
            if worth_it and start <= soonest and load.keeps_up(level):
                best, soonest = level, start
                in_time = waited + start <= settings.hold * settings.slo_ttft
                # As long as nothing waits, the first better level is enough.
                if not snapshot.num_waiting or (in_time and load.most(level) >= load.tokens_per_s):
                    break
            if level == top:
                break
            count *= 2
        return best

    # -- sequences at once

    def _limit(self, snapshot: Snapshot, state: MorphState, load: _Load, level: int) -> int | None:
        """Return how many sequences should run at once on a level: few, while the first tokens come in time."""
        settings = self.settings
        if not level:
            return state.ladder.initial.max_num_seqs
        if not settings.few:
            return None
        if self._at_risk(snapshot, load):
            return None
        most = load.room(level)
        sequences = min(most, load.room(0))
        while sequences < most:
            speed = sequences / load.seconds_per_token(level, sequences)
            if speed >= HEADROOM * load.tokens_per_s:
                break
            sequences = min(most, max(sequences + 1, sequences * 5 // 4))
        while sequences > 1 and load.seconds_per_token(level, sequences) > settings.slo_tpot:
            sequences -= 1
        # A limit that nothing reaches would only be a further change.
        return None if sequences >= min(most, load.running) else sequences

    def _at_risk(self, snapshot: Snapshot, load: _Load) -> bool:
        """Return whether first tokens may come late unless more sequences run."""
        settings = self.settings
        start = snapshot.oldest_wait + load.seconds_to_start(load.level)
        return snapshot.oldest_wait > AT_RISK * settings.slo_ttft or start > settings.hold * settings.slo_ttft

    def _limited(self, snapshot: Snapshot, plan: InstancePlan, state: MorphState, load: _Load, text: str) -> Answer:
        """Return the plan with another limit on sequences, if that is due, or the present plan with a text."""
        if not state.level:
            return plan, state, text
        wanted, present = self._limit(snapshot, state, load, state.level), plan.max_num_seqs
        lifted = wanted is None
        if wanted == present or state.leaving or (lifted and not self._at_risk(snapshot, load)):
            return plan, state, text
        if not lifted and snapshot.time - state.last_limit < LIMIT_INTERVAL:
            return plan, state, text
        state = replace(state, last_limit=snapshot.time)
        changed = plan.with_max_num_seqs(wanted)
        return changed, state, f"{text}: {_change_text(plan, changed)}"

    # -- release

    def _at_home(self, snapshot: Snapshot, plan: InstancePlan, state: MorphState) -> Proposal[MorphState]:
        """Return to the plan at the start where only KV pages or the limit on sequences differ from it."""
        initial = state.ladder.initial
        if plan is initial or plan == initial or snapshot.kv_pages_used > initial.kv_pages - 1:
            return Proposal(plan, state)
        return Proposal(initial, state, f"no layer has fewer bits: {_change_text(plan, initial)}")

    def _leave_if_harmful(
        self, snapshot: Snapshot, plan: InstancePlan, state: MorphState, load: _Load
    ) -> Answer | None:
        """Return the way back to the plan at the start if that is estimated to be faster, by what steps have taken."""
        initial = state.ladder.initial
        home, here = load.seconds_to_start(0), load.seconds_to_start(load.level)
        factor = 1 / HARM if state.leaving else HARM
        if here < factor * home or not here or snapshot.expected_seconds - state.planned.expected_seconds < EVIDENCE:
            return None
        text = f"the last of {load.waiting} waiting is expected to start {_ms(here - home)} sooner in full precision"
        if snapshot.kv_pages_used <= initial.kv_pages - 1:
            state = self._with_biases(snapshot, replace(state, last_release=snapshot.time, first_entry=None))
            state = replace(state, leaving=False)
            return initial, state, f"{text}: {_change_text(plan, initial)}"
        drained = plan.with_max_num_seqs(load.room(0))
        if plan.max_num_seqs is not None and plan.max_num_seqs <= load.room(0):
            pages = f"{snapshot.kv_pages_used} pages in use > {initial.kv_pages - 1}"
            return plan, state, f"{text}, but {pages}"
        return drained, replace(state, last_limit=snapshot.time, leaving=True), f"{text}: {_change_text(plan, drained)}"

    def _release(self, snapshot: Snapshot, plan: InstancePlan, state: MorphState) -> Answer:
        settings, now, ladder = self.settings, snapshot.time, state.ladder
        load = self._load(snapshot, state)
        if (passed := now - state.last_release) < settings.release_interval:
            return plan, state, f"{passed:.1f} s after the last release < {settings.release_interval:g} s"
        if answer := self._leave_if_harmful(snapshot, plan, state, load):
            return answer
        state = self._with_relapse(state)
        if obstacle := self._release_obstacle(snapshot, state) or self._relapse_obstacle(snapshot, state):
            return self._limited(snapshot, plan, state, load, obstacle)
        lowest = max(0, state.level - math.ceil(settings.release_layers * ladder.top))
        level = next((n for n in range(lowest, state.level) if not self._no_room(snapshot, plan, load, n)), None)
        if level is None:
            return self._limited(snapshot, plan, state, load, self._no_room(snapshot, plan, load, state.level - 1))
        wanted = ladder.plan(level).with_max_num_seqs(self._limit(snapshot, state, load, level))
        calm = self._calm_text(snapshot, state)
        usage = self._usage_text(snapshot, "<=", wanted.kv_pages)
        reason = f"{calm}, {usage}: {_change_text(plan, wanted)}"
        if level > lowest:
            reason += f"; for more: {self._no_room(snapshot, plan, load, level - 1)}"
        arrivals = self._arrivals(snapshot)
        state = replace(state, last_release=now, release_arrivals=arrivals, peak_arrivals=arrivals, first_entry=None)
        return wanted, state, reason

    def _no_room(self, snapshot: Snapshot, plan: InstancePlan, load: _Load, level: int) -> str:
        """Return why a lower level would be too small for the load, as a text; "" if it is not."""
        settings, pages = self.settings, load.ladder.plan(level).kv_pages
        if pages < plan.kv_pages:
            used = max(self._kv_usages(snapshot).values()) * snapshot.kv_pages_total
            if used > settings.release_usage * (pages - 1):
                return self._usage_text(snapshot, ">", pages)
        asked, limit = load.tokens_per_s, settings.release_capacity * load.most(level)
        if self._resources.costs is not None and asked > limit and load.most(level) < load.most(load.level):
            share = f"{settings.release_capacity:.0%} of the estimated {load.most(level):.0f} with more bits"
            return f"{asked:.0f} tokens/s asked for > {share}"
        return ""

    def _release_obstacle(self, snapshot: Snapshot, state: MorphState) -> str:
        """Return why no layer may change back yet, as a text; "" if there is no obstacle."""
        settings, recent = self.settings, snapshot.recent
        assert recent is not None
        assert state.quiet_since is not None
        window = f"in the last {recent.seconds:.0f} s"
        if (quiet := snapshot.time - state.quiet_since) < settings.release_quiet:
            return f"quiet for {quiet:.1f} s < {settings.release_quiet:g} s"
        if snapshot.num_waiting:
            return f"{snapshot.num_waiting} waiting > 0"
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

    def _calm_text(self, snapshot: Snapshot, state: MorphState) -> str:
        """Return why layers may change back, as a text."""
        settings, recent = self.settings, snapshot.recent
        assert recent is not None
        assert state.quiet_since is not None
        return (
            f"quiet for {snapshot.time - state.quiet_since:.1f} s >= {settings.release_quiet:g} s, nothing waiting, "
            f"mean queue {recent.waiting:.1f} <= {settings.release_waiting:g}, "
            f"no preemption in {recent.seconds:.0f} s"
        )

    def _relapse_obstacle(self, snapshot: Snapshot, state: MorphState) -> str:
        """Return why an earlier relapse forbids a release, as a text; "" after a long time or for a lower load."""
        settings, past, arrivals = self.settings, snapshot.time - state.relapse_time, self._arrivals(snapshot)
        if past > settings.relapse_memory or arrivals <= settings.relapse_load * state.relapse_arrivals:
            return ""
        limit = f"{settings.relapse_load:.0%} of {state.relapse_arrivals:.1f}"
        remaining = settings.relapse_memory - past
        until = "" if remaining == math.inf else f", for {remaining:.0f} s more"
        return f"held after a relapse: {arrivals:.1f} arrivals/s > {limit}{until}"

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

    def _arrivals(self, snapshot: Snapshot) -> float:
        """Return the sequences that arrive per second."""
        assert snapshot.recent is not None
        return snapshot.recent.arrivals_per_s or 0.0

    def _kv_usages(self, snapshot: Snapshot) -> dict[str, float]:
        """Return shares of the present KV pages that a smaller pool must hold, by a text that says when."""
        recent, horizon = snapshot.recent, self.settings.release_horizon
        assert recent is not None
        rise = max(0.0, recent.kv_trend or 0.0) * horizon
        now = snapshot.kv_usage
        return {"in use": now, "in use on average": recent.kv_usage, f"in use in {horizon:g} s": now + rise}

    def _usage_text(self, snapshot: Snapshot, relation: str, pages: int) -> str:
        """Return a text that compares the largest usage with the margin of a pool of `pages`."""
        usages = self._kv_usages(snapshot)
        when = max(usages, key=lambda text: usages[text])
        used = usages[when] * snapshot.kv_pages_total
        return f"{used:.0f} pages {when} {relation} {self.settings.release_usage:.0%} of {pages - 1}"


def _change_text(before: InstancePlan, after: InstancePlan) -> str:
    """Return what a decision changes, as a text such as "layers 3, 7 to int4, KV 800 -> 960 pages"."""
    layers: dict[str, list[str]] = {}
    for old, new in zip(before.blocks, after.blocks, strict=True):
        if old.precision != new.precision:
            layers.setdefault(new.precision, []).append(new.block.removeprefix("layers."))
    parts = [f"layer{'s' if len(n) > 1 else ''} {', '.join(n)} to {precision}" for precision, n in layers.items()]
    if before.kv_pages != after.kv_pages:
        parts.append(f"KV {before.kv_pages} -> {after.kv_pages} pages")
    if before.max_num_seqs != after.max_num_seqs:
        limits = ("all" if n is None else n for n in (before.max_num_seqs, after.max_num_seqs))
        parts.append("at most {} -> {} sequences at once".format(*limits))
    return ", ".join(parts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
