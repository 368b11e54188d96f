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
EVIDENCE = 2.0  # s of steps after which a level is known to be slower or faster than estimated
WEIGHT = 0.25  # s of steps; an average of all levels counts as much as so many of the level's own


@dataclass(frozen=True)
class Window:
    """A window of the last one to two lengths of time, in the sums that snapshots have."""

    length: float  # s
    begin: Snapshot = START
    middle: Snapshot = START  # the begin of the next window

    def at(self, snapshot: Snapshot) -> "Window":
        """Return the window at the time of a snapshot."""
        passed = snapshot.time - self.middle.time > self.length
        return Window(self.length, self.middle, snapshot) if passed else self

    def restarted(self, snapshot: Snapshot) -> "Window":
        """Return a window that begins now."""
        return Window(self.length, snapshot, snapshot)


@dataclass(frozen=True)
class StepSeconds:
    """The time that some steps took, and what was expected of them."""

    busy: float = 0.0  # s
    expected: float = 0.0  # s

    @classmethod
    def between(cls, before: Snapshot, now: Snapshot) -> "StepSeconds":
        """Return the seconds of the steps that ended between two snapshots."""
        return cls(now.busy_seconds - before.busy_seconds, now.expected_seconds - before.expected_seconds)

    def __add__(self, other: "StepSeconds") -> "StepSeconds":
        return StepSeconds(self.busy + other.busy, self.expected + other.expected)

    def bias(self, usual: float = 1.0) -> float:
        """Return the seconds that steps take as a multiple of those expected: the `usual` one unless many are known."""
        return (self.busy + WEIGHT * usual) / (self.expected + WEIGHT) if self.expected else usual


@dataclass(frozen=True)
class MorphState:
    """State of the policy for an instance. Times are seconds of the snapshots' clock."""

    ladder: Ladder
    plan: InstancePlan  # that was in force when the policy was asked last
    level: int = 0  # of `plan`
    past: Window = Window(30.0)  # whose requests are the workload
    steps: Window = Window(5.0)  # of steps on this level; short, because light loads tell little about heavy ones
    # Steps of the last stays on level 0, and on other levels.
    full_steps: StepSeconds = StepSeconds()
    fewer_steps: StepSeconds = StepSeconds()
    fewer_time: float = NEVER  # when the last step on another level ended
    pressure_since: float | None = None
    quiet_since: float | None = None
    waiting_since: float | None = None  # when sequences began to wait for longer than `queue_delay`, at every moment
    last_entry: float = NEVER
    last_release: float = NEVER
    last_limit: float = NEVER  # when the number of sequences at once was limited
    leaving: bool = False  # fewer sequences run, until the pages in use fit into full precision's
    last_harm: float = NEVER  # when full precision turned out to be better
    returns: int = 0  # how often pressure came back soon after that
    release_arrivals: float = 0.0  # arrivals/s at the last release
    peak_arrivals: float = 0.0  # largest arrivals/s since the last release
    first_entry: float | None = None  # time of the first entry since the last release
    relapse_arrivals: float = math.inf  # arrivals/s at a release that was a mistake
    relapse_time: float = NEVER  # when pressure returned after that release

    def observed(self, snapshot: Snapshot, plan: InstancePlan) -> "MorphState":
        """Return the state with what the steps so far have taught, and with the plan that is now in force."""
        state = replace(self, past=self.past.at(snapshot), steps=self.steps.at(snapshot))
        if plan is self.plan:
            return state
        # As the same instance may come back as another object, it is compared only when it has changed.
        level = 0 if plan == self.ladder.initial else self.ladder.level_of(plan)
        if level == self.level:
            return replace(state, plan=plan)
        state = self.with_steps(snapshot)
        return replace(state, plan=plan, level=level, steps=self.steps.restarted(snapshot), leaving=False)

    def is_current(self, snapshot: Snapshot, plan: InstancePlan) -> bool:
        """Return whether `observed` would change nothing."""
        return plan is self.plan and all(window.at(snapshot) is window for window in (self.past, self.steps))

    def has_evidence(self, snapshot: Snapshot) -> bool:
        """Return whether enough steps have ended on the present level to tell how fast it is."""
        return StepSeconds.between(self.steps.begin, snapshot).busy >= EVIDENCE

    def with_steps(self, snapshot: Snapshot) -> "MorphState":
        """Return the state with the steps on the present level. Those of earlier stays count only next to few."""
        steps = StepSeconds.between(self.steps.begin, snapshot)
        earlier = self.fewer_steps if self.level else self.full_steps
        if steps.busy < EVIDENCE:
            steps += earlier
        if not self.level:
            return replace(self, full_steps=steps)
        return replace(self, fewer_steps=steps, fewer_time=snapshot.time)

    def biases(self, now: float, memory: float) -> tuple[float, float]:
        """Return the seconds that steps take as multiples of those expected, on level 0 and on other levels.

        What was seen on other levels counts for `memory` seconds.
        """
        full, fewer = self.full_steps, self.fewer_steps if now - self.fewer_time <= memory else StepSeconds()
        usual = (full + fewer).bias()
        return full.bias(usual), fewer.bias(usual)

    def workload(self, snapshot: Snapshot, page_size: int) -> Workload:
        """Return the workload of the last one to two windows."""
        return Workload.between(self.past.begin, snapshot, page_size)

    def under_pressure(self, now: float) -> "MorphState":
        """Return the state at a moment of pressure."""
        return replace(
            self, pressure_since=now if self.pressure_since is None else self.pressure_since, quiet_since=None
        )

    def quiet(self, now: float) -> "MorphState":
        """Return the state at a moment without pressure."""
        return replace(self, quiet_since=now if self.quiet_since is None else self.quiet_since, pressure_since=None)

    def entered(self, now: float, settings: MorphSettings) -> "MorphState":
        """Return the state after an entry."""
        first = now if self.first_entry is None else self.first_entry
        state = replace(self, last_entry=now, last_limit=now, first_entry=first)
        if self.level:
            return state
        return replace(state, returns=self.returns + 1 if now - self.last_harm <= settings.relapse else 0)

    def released(self, now: float, arrivals: float) -> "MorphState":
        """Return the state after a release under a number of arrivals per second."""
        return replace(self, last_release=now, release_arrivals=arrivals, peak_arrivals=arrivals, first_entry=None)

    def left(self, snapshot: Snapshot) -> "MorphState":
        """Return the state after all layers have returned because full precision is better."""
        now = snapshot.time
        state = self.with_steps(snapshot)
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
