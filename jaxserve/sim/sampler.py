"""Samples of the gauges and counters of all instances over virtual time."""

from collections.abc import Mapping
from math import inf
from typing import Protocol

from jaxserve.core.clock import Clock
from jaxserve.sim.control import SimControl
from jaxserve.telemetry import Snapshot
from jaxserve.telemetry.exposition import gauges

MAX_SAMPLES = 20_000  # beyond this, every other sample is dropped and the interval doubles


class Sampled(Protocol):
    """What is sampled: the front of a simulation."""

    def snapshot(self) -> Snapshot:
        """Return the state of all instances together."""
        ...


class SimSampler:
    """A `simulation.Control` that samples the instances at an interval, and drives a controller if there is one."""

    def __init__(self, instances: Sampled, clock: Clock, interval: float, control: SimControl | None = None):
        """Sample every `interval` seconds; 0 for no samples."""
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
            self._sample(now)
            self._due = now + self._interval

    def finish(self) -> None:
        """Stop sampling after the last request, once the plan at the start is in force again."""
        self._over = True

    def series(self) -> dict[str, list[float]]:
        """Return the samples as {"t": times (s), name: a value for each time}, with 0 for missing values.

        The names are those that `bench.sampler` reads from a server's /metrics.
        """
        if not self._samples:
            return {}
        names = dict.fromkeys(name for sample in self._samples for name in sample)
        return {"t": [*self._times]} | {name: [sample.get(name, 0) for sample in self._samples] for name in names}

    def _sample(self, now: float) -> None:
        self._times.append(now)
        self._samples.append(values_of(self._instances.snapshot()))
        if len(self._times) > MAX_SAMPLES:
            self._times, self._samples = self._times[::2], self._samples[::2]
            self._interval *= 2


def values_of(snapshot: Snapshot) -> dict[str, float]:
    """Return the gauges and counters that a server's /metrics would show for a snapshot."""
    layers = sorted(snapshot.layers_by_precision.items())  # their order is that of a set
    return {
        **gauges(snapshot),
        **{f'layers_by_precision{{precision="{name}"}}': count for name, count in layers},
        "num_preemptions_total": snapshot.preemptions,
        "generation_tokens_total": snapshot.generated_tokens,
    }
