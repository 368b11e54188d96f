"""What the morph policy remembers of an instance."""

import math
from dataclasses import dataclass, replace

from jaxserve.control.capacity import Workload
from jaxserve.control.plan import InstancePlan
from jaxserve.control.policies.ladder import Ladder
from jaxserve.control.policies.morph_settings import MorphSettings
from jaxserve.telemetry import Snapshot

NEVER = -math.inf
START = Snapshot()  # before the first step
WORKLOAD_WINDOW = 30.0  # s; the workload is that of the last one to two windows
EVIDENCE = 2.0  # s of steps from which the estimates are corrected


@dataclass(frozen=True)
class MorphState:
    """State of the policy for an instance. Times are seconds of the snapshots' clock."""

    ladder: Ladder
    plan: InstancePlan  # that was in force when the policy was asked last
    level: int = 0  # of `plan`
    planned: Snapshot = START  # when `level` was reached
    older: Snapshot = START  # the begin of the workload's window
    newer: Snapshot = START  # the begin of the next window
    # Biases: seconds that steps took, as a multiple of what was expected; None if that is not known.
    full_bias: float | None = None  # on level 0
    fewer_bias: float | None = None  # on other levels
    fewer_bias_time: float = NEVER  # when `fewer_bias` was measured
    pressure_since: float | None = None
    quiet_since: float | None = None
    last_entry: float = NEVER
    last_release: float = NEVER
    last_limit: float = NEVER  # when the number of sequences at once was limited
    leaving: bool = False  # fewer sequences run, until the pages in use fit into full precision's
    last_harm: float = NEVER  # when full precision turned out to be better
    release_arrivals: float = 0.0  # arrivals/s at the last release
    peak_arrivals: float = 0.0  # largest arrivals/s since the last release
    first_entry: float | None = None  # time of the first entry since the last release
    relapse_arrivals: float = math.inf  # arrivals/s at a release that was a mistake
    relapse_time: float = NEVER  # when pressure returned after that release

    def observed(self, snapshot: Snapshot, plan: InstancePlan) -> "MorphState":
        """Return the state with what the steps so far have taught, and with the plan that is now in force."""
        state = self.with_biases(snapshot)
        if plan is not self.plan:
            # As the same instance may come back as another object, it is compared only when it has changed.
            level = 0 if plan == self.ladder.initial else self.ladder.level_of(plan)
            if level != self.level:
                state = replace(state, level=level, planned=snapshot, leaving=False)
            state = replace(state, plan=plan)
        if snapshot.time - state.newer.time > WORKLOAD_WINDOW:
            state = replace(state, older=state.newer, newer=snapshot)
        return state

    def has_evidence(self, snapshot: Snapshot) -> bool:
        """Return whether enough steps have ended on the present level to correct the estimates."""
        return snapshot.expected_seconds - self.planned.expected_seconds >= EVIDENCE

    def with_biases(self, snapshot: Snapshot) -> "MorphState":
        """Return the state with the bias of the steps on the present level."""
        if not self.has_evidence(snapshot):
            return self
        expected = snapshot.expected_seconds - self.planned.expected_seconds
        bias = (snapshot.busy_seconds - self.planned.busy_seconds) / expected
        if not self.level:
            return replace(self, full_bias=bias)
        return replace(self, fewer_bias=bias, fewer_bias_time=snapshot.time)

    def biases(self, now: float, memory: float) -> tuple[float, float]:
        """Return the biases of level 0 and of other levels.

        That of other levels counts for `memory` seconds. Later, and until it is measured, it is taken to be the same.
        """
        full, fewer = self.full_bias, self.fewer_bias
        if fewer is not None and now - self.fewer_bias_time <= memory:
            return 1.0 if full is None else full, fewer
        both = next((bias for bias in (full, fewer) if bias is not None), 1.0)
        return both, both

    def workload(self, snapshot: Snapshot, page_size: int) -> Workload:
        """Return the workload of the last one to two windows."""
        return Workload.between(self.older, snapshot, page_size)

    def under_pressure(self, now: float) -> "MorphState":
        """Return the state at a moment of pressure."""
        return replace(
            self, pressure_since=now if self.pressure_since is None else self.pressure_since, quiet_since=None
        )

    def quiet(self, now: float) -> "MorphState":
        """Return the state at a moment without pressure."""
        return replace(self, quiet_since=now if self.quiet_since is None else self.quiet_since, pressure_since=None)

    def entered(self, now: float) -> "MorphState":
        """Return the state after an entry."""
        first = now if self.first_entry is None else self.first_entry
        return replace(self, last_entry=now, last_limit=now, first_entry=first)

    def released(self, now: float, arrivals: float) -> "MorphState":
        """Return the state after a release under a number of arrivals per second."""
        return replace(self, last_release=now, release_arrivals=arrivals, peak_arrivals=arrivals, first_entry=None)

    def left(self, snapshot: Snapshot) -> "MorphState":
        """Return the state after all layers have returned because full precision is better."""
        now = snapshot.time
        state = self.with_biases(snapshot)
        return replace(state, last_release=now, last_harm=now, first_entry=None, leaving=False)

    def with_relapse(self, settings: MorphSettings) -> "MorphState":
        """Return the state with a relapse noted, if pressure returned soon after the last release.

        It is not a relapse if arrivals have grown so much that the release was not the cause.
        """
        if self.first_entry is None or self.first_entry - self.last_release > settings.relapse:
            return self
        if self.release_arrivals == 0 or self.peak_arrivals > settings.relapse_rise * self.release_arrivals:
            return self
        return replace(self, relapse_arrivals=self.release_arrivals, relapse_time=self.first_entry)
