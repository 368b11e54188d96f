"""One simulated run of a candidate with a number of instances."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve.sim.build import build_simulation
from jaxserve.sim.capacity.limits import limit_of
from jaxserve.sim.capacity.objectives import Objective, end_of_run, measure, misses
from jaxserve.sim.cluster import Cluster
from jaxserve.sim.request_columns import RequestColumns
from jaxserve.sim.workload import SimWorkload

INTERVAL_S = 1.0  # of the samples from which the limit is found


@dataclass(frozen=True)
class Evaluation:
    """The findings of a simulated run."""

    figures: tuple[float, ...]  # ms, by objective; infinity if too many requests were missed
    objectives: tuple[Objective, ...]
    missed: int  # requests that were refused or did not end
    requests: int
    limit: str  # what bounds the cluster under this load
    idle_policy: str | None  # why the policy changed nothing

    @property
    def meets(self) -> bool:
        """True if all objectives are met."""
        return all(figure <= each.limit for figure, each in zip(self.figures, self.objectives, strict=True))

    @property
    def failure(self) -> str:
        """The objectives that are not met, with what was reached."""
        pairs = zip(self.figures, self.objectives, strict=True)
        return ", ".join(f"{each.name} {duration(figure)}" for figure, each in pairs if figure > each.limit)


def evaluate(
    cluster: Cluster, workload: SimWorkload, objectives: Sequence[Objective], model_folder: Path | None = None
) -> Evaluation:
    """Simulate until all requests have ended or the time of the run is over (`end_of_run`).

    Equal arguments give equal results.
    """
    trace = workload.trace
    columns = RequestColumns(trace)
    end = end_of_run(objectives, trace.duration_s, int(columns.output_tokens.max()))
    built = build_simulation(cluster, detailed=False, interval=INTERVAL_S, model_folder=model_folder)
    for number, answered in enumerate(built.simulation.run(workload.requests()), 1):
        columns.take(answered)
        if number == len(workload):
            built.sampler.finish()
            break
        if answered.last_token is not None and answered.last_token > end:
            break
    control = built.control
    return Evaluation(
        measure(columns, objectives, end),
        tuple(objectives),
        int(misses(columns, end).sum()),
        len(workload),
        limit_of(cluster, columns, built.sampler.series()),
        None if control is None else control.idle_reason,
    )


def duration(ms: float) -> str:
    """Return a time (ms) in words: "41.3 ms", "3.1 s", or "not reached" for infinity."""
    if ms == float("inf"):
        return "not reached"
    return f"{ms / 1e3:,.3g} s" if ms >= 1e3 else f"{ms:.3g} ms"
