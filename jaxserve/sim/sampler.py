"""Samples of the gauges and counters of all instances over virtual time."""

from collections.abc import Mapping, Sequence
from math import inf

from jaxserve.core.clock import Clock
from jaxserve.sim.control import SimControl
from jaxserve.sim.instance import SimInstance
from jaxserve.telemetry import Snapshot, combine
from jaxserve.telemetry.metrics import gauges

MAX_SAMPLES = 20_000  # kept; of more, every other one goes and the interval doubles


class SimSampler:
    """A `simulation.Control` that looks at the instances, and lets another control do its part."""

    def __init__(
        self, instances: Sequence[SimInstance], clock: Clock, interval: float, control: SimControl | None = None
    ):
        """`interval`: seconds; 0: no samples."""
        self._instances, self._clock, self._control = instances, clock, control
        self._interval = interval or inf
        self._due = clock.now() if interval else inf
        self._times: list[float] = []
        self._samples: list[Mapping[str, float]] = []
        self._over = False

    def next_event(self) -> float:
        if self._control is None:
            return inf if self._over else self._due
        if self._over and self._control.settled_since is not None:
            return inf
        return min(self._due, self._control.next_event())

    def advance(self) -> None:
        now = self._clock.now()
        if self._control is not None and self._control.next_event() <= now:
            self._control.advance()
        if now >= self._due:
            self._look(now)
            self._due = now + self._interval

    def finish(self) -> None:
        """The last request has ended: there is no event any more once the plan is that of the start. Mutates."""
        self._over = True

    def series(self) -> dict[str, list[float]]:
        """{"t": seconds, name: a value for each t, 0 where it was not there}."""
        if not self._samples:
            return {}
        names = dict.fromkeys(name for sample in self._samples for name in sample)
        return {"t": [*self._times]} | {name: [sample.get(name, 0) for sample in self._samples] for name in names}

    def _look(self, now: float) -> None:
        self._times.append(now)
        self._samples.append(values_of(combine([instance.snapshot() for instance in self._instances])))
        if len(self._times) > MAX_SAMPLES:
            self._times, self._samples = self._times[::2], self._samples[::2]
            self._interval *= 2


def values_of(snapshot: Snapshot) -> dict[str, float]:
    """What a server's metrics say of such a state."""
    layers = sorted(snapshot.layers_by_precision.items())  # they come from a set
    return {
        **gauges(snapshot),
        **{f'layers_by_precision{{precision="{name}"}}': count for name, count in layers},
        "num_preemptions_total": snapshot.preemptions,
        "generation_tokens_total": snapshot.generated_tokens,
    }
