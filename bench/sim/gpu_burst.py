"""A burst that was measured on an H200, and its simulation: `python -m bench.sim.gpu_burst`.

Full precision, static int4 and `morph` served the same arrivals (bench/results/gpu-adaptation). The hardware file
beside the results stands for the kernels of that day; it is fitted to products, steps and loops that were measured
alone. Like the servers, the simulated ones first answer the requests that warmed them. `morph` makes the changes that
it made on the device, when it made them, so that its row shows the device and not today's policy. Every figure is the
median of several simulations whose bursts begin some milliseconds apart: near the edge of the KV pages, milliseconds
decide.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.sim.runs import table
from jaxserve.bench.record import RequestRecord
from jaxserve.bench.traces.trace import Trace
from jaxserve.control.plan import InstancePlan
from jaxserve.control.policy import Proposal
from jaxserve.control.resources import Resources
from jaxserve.sim.build import build_simulation
from jaxserve.sim.options import ClusterOptions
from jaxserve.sim.run import cluster_of, simulate
from jaxserve.sim.workload import SimWorkload
from jaxserve.telemetry import Snapshot

FOLDER = Path(__file__).resolve().parents[1] / "results" / "gpu-adaptation"
MODEL = FOLDER / "llama-3-8b-16-layers.json"
PROMPT, ANSWER, SPREAD = 512, 256, 0.25  # tokens, and by which share they differ
BURST_S = 26.0
WARMING, WARMING_S = 20, 0.15  # requests that warmed each server, and the seconds between two of them
BEGINS = {"full": 13.5, "int4": 5.0, "morph": 5.0}  # s: of the burst, when the programs used before it were fused
AT_ONCE, AT_ONCE_S = 100, 5.0  # requests by which full precision's capacity was measured, and when (s)
MORPH_PAGES = 1057
# What `morph` did: seconds after the begin of the burst, and how many layers there were then in each precision.
CHANGES = ((9.5, 4, 0), (10.6, 4, 8), (21.8, 4, 7), (29.2, 4, 0), (30.8, 0, 0))
ORDER = (8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2)  # of the layers that changed
FIGURES = ("P95 TTFT", "P50 TPOT", "P95 TPOT")
DELAYS = (0.0, 0.011, 0.022, 0.033, 0.044)  # s, of the burst


@dataclass(frozen=True)
class Replayed:
    """A policy that makes the changes of `CHANGES`."""

    resources: Resources
    swap_order: Sequence[int]
    begin: float = BEGINS["morph"]
    name: str = "replayed"
    precisions: tuple[str, ...] = ("int4", "int8")

    def init(self, plan: InstancePlan) -> InstancePlan:
        return plan

    def update(self, snapshot: Snapshot, plan: InstancePlan, state: InstancePlan) -> Proposal[InstancePlan]:
        due = [change for change in CHANGES if snapshot.time - self.begin >= change[0]]
        _, int4, int8 = due[-1] if due else (0.0, 0, 0)
        fewer = dict.fromkeys(ORDER[:int4], "int4") | dict.fromkeys(ORDER[int4 : int4 + int8], "int8")
        wanted = state.with_precisions({f"layers.{layer}": precision for layer, precision in fewer.items()})
        wanted = wanted.with_kv_pages(self.resources.kv_capacity(wanted) if fewer else state.kv_pages)
        return Proposal(wanted if snapshot.kv_pages_used < wanted.kv_pages else plan, state, "as measured")


def figures(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Return percentiles of the times to the first token, per output token and to whole answers (s), by name."""
    ttft = [record.chunk_times_s[0] - record.due_s for record in records]
    tpot = [
        (record.chunk_times_s[-1] - record.chunk_times_s[0]) / (record.output_tokens - 1)
        for record in records
        if record.output_tokens > 1
    ]
    whole = [(record.end_s or 0.0) - record.due_s for record in records]
    return {
        f"P{percent} {name}": float(np.percentile(values, percent))
        for name, values in (("TTFT", ttft), ("TPOT", tpot), ("answer", whole))
        for percent in (50, 95)
    }


def options(**changes: Any) -> ClusterOptions:
    """Return the options of the servers that were measured."""
    return replace(
        ClusterOptions(
            model=str(MODEL),
            hardware=str(FOLDER / "h200.yaml"),
            memory_gb=11.46244608,
            max_num_seqs=128,
            max_num_batched_tokens=1152,
            max_model_len=1024,
            page_size=16,
            prefix_caching=False,
        ),
        **changes,
    )


SYSTEMS: Mapping[str, dict[str, Any]] = {
    "full": {},
    "int4": {"precision": "int4"},
    "morph": {"policy": f"{__file__}:Replayed", "kv_pages": MORPH_PAGES - 1, "max_kv_pages": 6000},
}


def served(cluster_options: ClusterOptions, trace: Trace) -> list[RequestRecord]:
    """Return the records of a simulated trace, in order of arrival."""
    workload = SimWorkload(trace, trace.description())
    built = build_simulation(cluster_of(cluster_options, prefix_caching=False), detailed=True, interval=0.0)
    found = simulate(built, workload, detailed=True).records or []
    return sorted(found, key=lambda record: record.index)


def measured_trace(system: str, delay: float) -> Trace:
    """Return the requests that a server got: those that warmed it, and then the burst, `delay` s later."""
    rng, begin = np.random.default_rng(3), BEGINS[system] + delay
    sizes = [_lengths(rng, WARMING)]
    times = [np.arange(WARMING) * WARMING_S]
    if system == "full":
        sizes.append(_lengths(rng, AT_ONCE))
        times.append(np.full(AT_ONCE, AT_ONCE_S))
    burst = np.loadtxt(FOLDER / "burst.csv", delimiter=",", skiprows=1)
    sizes.append(burst[:, 1:].astype(int))
    times.append(begin + burst[:, 0])
    return Trace.of("burst", np.concatenate(times), *np.concatenate(sizes).T)


def _lengths(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return random lengths [count, 2] of prompts and answers, in tokens."""
    return (rng.uniform(1 - SPREAD, 1 + SPREAD, (count, 2)) * (PROMPT, ANSWER)).astype(int)


def simulated(system: str, delays: Sequence[float] = DELAYS) -> dict[str, float]:
    """Return the simulated figures (s) of the requests that arrived in the burst."""
    found = []
    for delay in delays:
        begin = BEGINS[system] + delay
        records = served(options(**SYSTEMS[system]), measured_trace(system, delay))
        found.append(figures([record for record in records if begin <= record.due_s <= begin + BURST_S]))
    return {name: median(each[name] for each in found) for name in found[0]}


def measured(system: str) -> dict[str, float]:
    """Return the measured figures (s) of the burst."""
    rows = json.loads((FOLDER / "h200.json").read_text(encoding="utf-8"))["systems"][system]
    (burst,) = (row for row in rows if row["case"] == "burst")
    return {f"P{p} {name}": burst[f"burst_{name.lower()}_p{p}"] for name in ("TTFT", "TPOT") for p in (50, 95)}


def main() -> None:
    """Print measured and simulated figures."""
    rows = []
    for system in sys.argv[1:] or SYSTEMS:
        real, found = measured(system), simulated(system)
        for name in ("P50 TTFT", *FIGURES):
            off = found[name] / real[name] - 1
            rows.append((f"{system}, {name}, ms", f"{1e3 * real[name]:.1f}", f"{1e3 * found[name]:.1f}", f"{off:+.0%}"))
    print(table(("H200, burst", "measured", "simulated", "error"), rows))


if __name__ == "__main__":
    main()
