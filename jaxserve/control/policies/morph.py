"""The morph policy: layers change to fewer bits under pressure, and their memory becomes KV pages (after MorphServe).

An instance is on a level of its `Ladder`. An entry climbs it, because pressure has lasted, the load is not expected to
be served in time, and the estimates say that a higher level serves it better. A release descends, because pressure is
over and the trends of KV usage and load allow it, or because the level has turned out not to help.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxserve.control.plan import InstancePlan
from jaxserve.control.policies import morph_release
from jaxserve.control.policies.ladder import Ladder, Loss
from jaxserve.control.policies.morph_load import Load, recent_of
from jaxserve.control.policies.morph_settings import ACCURACY, MorphSettings
from jaxserve.control.policies.morph_state import MorphState
from jaxserve.control.policies.morph_texts import change_text, ms
from jaxserve.control.policy import MAX_FORESEEN, Proposal
from jaxserve.control.resources import Resources
from jaxserve.core.block_names import layer_name
from jaxserve.core.errors import ConfigError
from jaxserve.telemetry import Snapshot

HARM = 1.2  # factor on the time to start at which full precision is taken to be the better one
LIMIT_INTERVAL = 5.0  # s that pass before another limit on sequences, unless it is lifted


@dataclass(frozen=True)
class _Moment:
    """An instance at the moment of a decision."""

    snapshot: Snapshot
    plan: InstancePlan  # in force
    state: MorphState
    load: Load

    @property
    def now(self) -> float:
        return self.snapshot.time

    def stay(self, text: str) -> Proposal[MorphState]:
        """Return the answer that nothing changes."""
        return Proposal(self.plan, self.state, text)

    def change(self, plan: InstancePlan, state: MorphState, text: str) -> Proposal[MorphState]:
        """Return the answer that another plan should be in force."""
        return Proposal(plan, state, f"{text}: {change_text(self.plan, plan, self.state.ladder.loss)}")


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
        now = snapshot.time
        if not state.is_current(snapshot, plan):
            state = state.observed(snapshot, plan)
        pressure = self._pressure(snapshot)
        waits = snapshot.oldest_wait > self.settings.queue_delay and snapshot.kv_usage > self.settings.kv_usage
        if waits != (state.waiting_since is not None):
            state = replace(state, waiting_since=now if waits else None)
        if not pressure and not state.level:
            return self._at_full_precision(snapshot, plan, state)
        state = replace(state, peak_arrivals=max(state.peak_arrivals, recent_of(snapshot).arrivals_per_s or 0.0))
        state = state.under_pressure(now) if pressure else state.quiet(now)
        moment = _Moment(snapshot, plan, state, Load.of(snapshot, state, self._resources, self.settings))
        return self._enter(moment, ", ".join(pressure)) if pressure else self._release(moment)

    def foresee(self, plan: InstancePlan) -> Sequence[InstancePlan]:
        """Return the plans after one decision, after an urgent one, and after each round of changes."""
        ladder, settings = self.init(plan).ladder, self.settings
        counts = {settings.entry_layers, settings.urgent_layers, *ladder.round_ends}
        levels = sorted({min(count, ladder.top) for count in counts} - {0})[-MAX_FORESEEN:]
        return [ladder.plan(level).with_kv_pages(plan.kv_pages) for level in levels]

    def largest(self, plan: InstancePlan) -> InstancePlan | None:
        """Return the plan of the ladder's top."""
        ladder = self.init(plan).ladder
        return ladder.plan(ladder.top)

    # -- entry

    def _pressure(self, snapshot: Snapshot) -> list[str]:
        """Return the thresholds of pressure that are exceeded, as texts."""
        settings, exceeded = self.settings, []
        if snapshot.oldest_wait > settings.queue_delay:
            exceeded.append(f"queue delay {ms(snapshot.oldest_wait)} > {ms(settings.queue_delay)}")
        if snapshot.kv_usage > settings.kv_usage:
            exceeded.append(f"KV usage {snapshot.kv_usage:.1%} > {settings.kv_usage:.0%}")
        # A time per token costs the more to compute, and most servers have no objective for it.
        if settings.slo_tpot < math.inf and (tpot := recent_of(snapshot).tpot or 0.0) > settings.slo_tpot:
            exceeded.append(f"TPOT {ms(tpot)} > {ms(settings.slo_tpot)}")
        return exceeded

    def _enter(self, moment: _Moment, pressure: str) -> Proposal[MorphState]:
        settings, state, load, now = self.settings, moment.state, moment.load, moment.now
        assert state.pressure_since is not None
        if (lasted := now - state.pressure_since) < settings.entry_hold:
            return moment.stay(f"{pressure} for {lasted:.1f} s < {settings.entry_hold:g} s")
        if state.level and (answer := self._leave_if_harmful(moment)):
            return answer
        if (passed := now - state.last_entry) < settings.entry_interval:
            return moment.stay(f"{pressure}, {passed:.1f} s after the last entry < {settings.entry_interval:g} s")
        if relief := load.relief():
            return self._limit(moment, f"{pressure}, but {relief}")
        level = load.better_level()
        if level == state.level:
            left = "no change is left" if level == state.ladder.top else "no change is expected to help"
            return self._limit(moment, f"{pressure}: {left}")
        plan = state.ladder.plan(level).with_max_num_seqs(load.max_num_seqs(level))
        answer = moment.change(plan, state.entered(now, settings), f"{pressure}, {load.need()}")
        return replace(answer, reason=f"{answer.reason}; then within {ms(load.last_wait(level))}")

    def _limit(self, moment: _Moment, text: str) -> Proposal[MorphState]:
        """Change the number of sequences at once if that is due. Otherwise nothing changes, as the text says."""
        plan, state, load = moment.plan, moment.state, moment.load
        wanted = load.max_num_seqs(state.level)
        if not state.level or state.leaving or wanted == plan.max_num_seqs:
            return moment.stay(text)
        due = load.at_risk if wanted is None else moment.now - state.last_limit >= LIMIT_INTERVAL
        if not due:
            return moment.stay(text)
        return moment.change(plan.with_max_num_seqs(wanted), replace(state, last_limit=moment.now), text)

    # -- release

    def _at_full_precision(self, snapshot: Snapshot, plan: InstancePlan, state: MorphState) -> Proposal[MorphState]:
        """Return to the plan at the start where only KV pages or the limit on sequences differ from it."""
        if state.pressure_since is not None:
            state = replace(state, pressure_since=None)
        initial = state.ladder.initial
        if plan is initial or plan == initial or snapshot.kv_pages_used > initial.kv_pages - 1:
            return Proposal(plan, state)
        return Proposal(initial, state, f"no layer has fewer bits: {change_text(plan, initial)}")

    def _leave_if_harmful(self, moment: _Moment) -> Proposal[MorphState] | None:
        """Return the way back to the plan at the start if that is estimated to be faster, by what steps have taken.

        A level that falls behind and is slower is left sooner: the longer the queue, the more the speed counts, and the
        less the room. As long as more pages are in use than full precision has, no more sequences run than it has room
        for.
        """
        snapshot, plan, state, load = moment.snapshot, moment.plan, moment.state, moment.load
        initial, now = state.ladder.initial, moment.now
        full, here = load.cost(0), load.cost(load.level)
        factor = 1 / HARM if state.leaving or load.loses else HARM ** (1 + state.returns)
        if not here or here < factor * full or not state.has_evidence(snapshot):
            return None
        text = f"answers are expected {here / full:.2f} times as late as in full precision"
        if snapshot.kv_pages_used <= initial.kv_pages - 1:
            return moment.change(initial, state.left(snapshot), text)
        room = load.room(0)
        if plan.max_num_seqs is not None and plan.max_num_seqs <= room:
            return moment.stay(f"{text}, but {snapshot.kv_pages_used} pages in use > {initial.kv_pages - 1}")
        return moment.change(plan.with_max_num_seqs(room), replace(state, last_limit=now, leaving=True), text)

    def _release(self, moment: _Moment) -> Proposal[MorphState]:
        settings, now = self.settings, moment.now
        if (passed := now - moment.state.last_release) < settings.release_interval:
            return moment.stay(f"{passed:.1f} s after the last release < {settings.release_interval:g} s")
        if answer := self._leave_if_harmful(moment):
            return answer
        moment = replace(moment, state=moment.state.with_relapse(settings))
        snapshot, plan, state, load = moment.snapshot, moment.plan, moment.state, moment.load
        for obstacle in (morph_release.unrest, morph_release.relapse):
            if text := obstacle(snapshot, state, settings):
                return self._limit(moment, text)
        lowest = max(0, state.level - math.ceil(settings.release_layers * state.ladder.top))
        shortages = {n: morph_release.shortage(snapshot, plan, load, n) for n in range(lowest, state.level)}
        level = next((n for n, shortage in shortages.items() if not shortage), None)
        if level is None:
            return self._limit(moment, shortages[state.level - 1])
        lower = state.ladder.plan(level).with_max_num_seqs(load.max_num_seqs(level))
        calm = morph_release.calm_text(snapshot, state, settings)
        usage = morph_release.usage_text(snapshot, settings, "<=", lower.kv_pages)
        arrivals = recent_of(snapshot).arrivals_per_s or 0.0
        answer = moment.change(lower, state.released(now, arrivals), f"{calm}, {usage}")
        more = f"; for more: {shortages[level - 1]}" if level > lowest else ""
        return replace(answer, reason=answer.reason + more)
