"""Windows of real traces with four policies, simulated: Llama-3-8B, by default on an L4.

    python -m bench.sim.windows [--traces FOLDER] [--setting l4|l4-marlin|h200|h200-short]

Full precision, int4, and morph in both modes run in the same memory. Windows are slowed and lengths are multiplied so
that full precision on an L4 is saturated at their peaks. On an H200 they are faster by a factor, for the same reason;
`h200-short` is an H200 of which other models leave 24 GB. A mark stands where morph is worse than the better of full
precision and int4 by more than a point of violations while its P95 is worse by more than 5 %.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from bench.sim.runs import parser, simulated, table, written
from jaxserve.bench.options import TraceOptions
from jaxserve.bench.result import Result
from jaxserve.sim.options import ClusterOptions

WINDOWS = {  # name: file of --traces, profile without it, requests/s, factors on time and on lengths
    "azure-conv": ("win72_azure_conv_1636.csv.gz", "azure-conv", 8.46, 14.0, 1.0),
    "azure-all": ("win72_azure_all_881.csv.gz", "azure-burst", 12.2, 14.0, 0.25),
    "burstgpt": ("burstgpt1_72s_744286.csv.gz", "burstgpt", 1.46, 1.75, 5.1),
    "azure-all, 640 s": ("win640_azure_all_510.csv.gz", "azure-burst", 8.4, 14.0, 0.25),
}
SECONDS = {"azure-all, 640 s": 640.0}  # of a window that is not 72 s long


@dataclass(frozen=True)
class Setting:
    """A machine, and the factor by which the windows are faster on it than on an L4."""

    hardware: str
    faster: float = 1.0
    memory_gb: float | None = None


SETTINGS = {
    "l4": Setting("l4"),
    "l4-marlin": Setting("l4-marlin"),
    "h200": Setting("h200", 30.0),
    "h200-short": Setting("h200", 24.0, 24.0),
}
SYSTEMS = {
    "full precision": {},
    "int4": {"precision": "int4", "head_precision": "bfloat16"},
    "morph": {"policy": "morph"},
    "morph-performance": {"policy": "morph-performance"},
}
UNADAPTED = ("full precision", "int4")
SLO = 2.0  # s


def run(setting: Setting, trace: TraceOptions, name: str, chosen: dict[str, Any]) -> Result:
    """Return the result of a system."""
    cluster = ClusterOptions(
        model="llama-3-8b",
        hardware=setting.hardware,
        memory_gb=setting.memory_gb,
        max_model_len=8192,
        slo_ttft=SLO,
        **chosen,
    )
    return simulated(cluster, trace, label=name, slo_s=SLO)


def row(window: str, name: str, results: dict[str, Result]) -> tuple[object, ...]:
    """Return a system's row of the table."""
    result = results[name]
    best = {key: min(results[other][key] for other in UNADAPTED) for key in ("slo_violation_rate", "p95_ttft_ms")}
    worse = result["slo_violation_rate"] > best["slo_violation_rate"] + 0.01
    mark = " (worse)" if worse and result["p95_ttft_ms"] > 1.05 * best["p95_ttft_ms"] else ""
    restored = result.get("restored_after_s")
    return (
        window, name, f"{100 * result['slo_violation_rate']:.1f}{mark if name not in UNADAPTED else ''}",
        " / ".join(f"{result[f'{key}_ttft_ms'] / 1e3:.2f}" for key in ("median", "p95", "p99")),
        f"{result['median_tpot_ms']:.0f}", f"{result['output_throughput']:.0f}",
        f"{max(result['server']['kv_pages_total']):.0f}",
        sum(d["outcome"] == "done" for d in result.get("decisions", ())),
        "-" if restored is None else f"{restored:.1f}",
    )  # fmt: skip


def main() -> None:
    """Simulate each policy in each window and report."""
    made = parser(__doc__)
    made.add_argument("--setting", default="l4", choices=SETTINGS)
    options = made.parse_args()
    setting = SETTINGS[options.setting]
    rows, violations = [], {}
    for window, (file, profile, rate, stretch, scale) in WINDOWS.items():
        shape = {"stretch": stretch / setting.faster, "scale_lengths": scale}
        if options.traces is not None:
            trace = TraceOptions(trace=options.traces / file, **shape)
        else:
            trace = TraceOptions(synthetic=profile, duration=SECONDS.get(window, 72.0), rate=rate, **shape)
        results = {name: run(setting, trace, name, chosen) for name, chosen in SYSTEMS.items()}
        rows += [row(window, name, results) for name in SYSTEMS]
        violations |= {(window, name): 100 * result["slo_violation_rate"] for name, result in results.items()}
    header = ("window", "policy", "SLO violated, %", "TTFT P50 / P95 / P99, s", "TPOT median, ms", "tokens/s",
              "most KV pages", "decisions", "restored after, s")  # fmt: skip
    figure, axis = plt.subplots(figsize=(8, 3.5), layout="constrained")
    for index, name in enumerate(SYSTEMS):
        places = np.arange(len(WINDOWS)) + 0.2 * (index - 1.5)
        axis.bar(places, [violations[window, name] for window in WINDOWS], 0.18, label=name)
    axis.set(xticks=range(len(WINDOWS)), xticklabels=list(WINDOWS), ylabel="SLO violations, %")
    axis.legend()
    where = "the published ones" if options.traces is not None else "generated with their profiles"
    text = f"# 72-second windows, Llama-3-8B on {options.setting}, simulated\n\n"
    text += f"Windows: {where}, slowed until full precision saturates in the peaks; SLO {SLO:g} s.\n"
    text += "KV pools grow in segments, as on GPU.\n\n"
    written(options.out, "windows", text + table(header, rows), figure)


if __name__ == "__main__":
    main()
