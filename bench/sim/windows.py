"""The 72-second windows with four policies, simulated: Llama-3-8B, by default on an L4.

    python -m bench.sim.windows [--traces FOLDER] [--hardware l4-marlin]

Full precision, int4, and morph in both modes run in the same memory. Windows are slowed and lengths are multiplied so
that full precision is saturated at their peaks.
"""

import numpy as np
from matplotlib import pyplot as plt

from bench.sim.runs import parser, simulated, table, written
from jaxserve.bench.options import TraceOptions
from jaxserve.sim.options import ClusterOptions

WINDOWS = {  # name: file of --traces, profile without it, requests/s, factors on time and on lengths
    "azure-conv": ("win72_azure_conv_1636.csv.gz", "azure-conv", 8.46, 14.0, 1.0),
    "azure-all": ("win72_azure_all_881.csv.gz", "azure-burst", 12.2, 14.0, 0.25),
    "burstgpt": ("burstgpt1_72s_744286.csv.gz", "burstgpt", 1.46, 1.75, 5.1),
}
SYSTEMS = {
    "full precision": {},
    "int4": {"precision": "int4", "head_precision": "bfloat16"},
    "morph": {"policy": "morph"},
    "morph-performance": {"policy": "morph-performance"},
}
SLO = 2.0  # s


def main() -> None:
    """Simulate each policy in each window and report."""
    made = parser(__doc__)
    made.add_argument("--hardware", default="l4", help="a name in configs/hardware or a YAML file")
    options = made.parse_args()
    rows, violations = [], {}
    for window, (file, profile, rate, stretch, scale) in WINDOWS.items():
        shape = {"stretch": stretch, "scale_lengths": scale}
        if options.traces is not None:
            trace = TraceOptions(trace=options.traces / file, **shape)
        else:
            trace = TraceOptions(synthetic=profile, duration=72.0, rate=rate, **shape)
        for name, chosen in SYSTEMS.items():
            cluster = ClusterOptions(
                model="llama-3-8b", hardware=options.hardware, max_model_len=8192, slo_ttft=SLO, **chosen
            )
            result = simulated(cluster, trace, label=name, slo_s=SLO)
            violations[window, name] = 100 * result["slo_violation_rate"]
            pages, restored = result["server"]["kv_pages_total"], result.get("restored_after_s")
            rows.append(
                (window, name, f"{violations[window, name]:.1f}",
                 " / ".join(f"{result[f'{key}_ttft_ms'] / 1e3:.2f}" for key in ("median", "p95", "p99")),
                 f"{result['median_tpot_ms']:.0f}", f"{result['output_throughput']:.0f}", f"{max(pages):.0f}",
                 sum(d["outcome"] == "done" for d in result.get("decisions", ())),
                 "-" if restored is None else f"{restored:.1f}")
            )  # fmt: skip
    header = ("window", "policy", "SLO violated, %", "TTFT P50 / P95 / P99, s", "TPOT median, ms", "tokens/s",
              "most KV pages", "decisions", "restored after, s")  # fmt: skip
    figure, axis = plt.subplots(figsize=(8, 3.5), layout="constrained")
    for index, name in enumerate(SYSTEMS):
        places = np.arange(len(WINDOWS)) + 0.2 * (index - 1.5)
        axis.bar(places, [violations[window, name] for window in WINDOWS], 0.18, label=name)
    axis.set(xticks=range(len(WINDOWS)), xticklabels=list(WINDOWS), ylabel="SLO violations, %")
    axis.legend()
    where = "the published ones" if options.traces is not None else "generated with their profiles"
    text = f"# 72-second windows, Llama-3-8B on {options.hardware}, simulated\n\n"
    text += f"Windows: {where}, slowed until full precision saturates in the peaks; SLO {SLO:g} s.\n"
    text += "KV pools grow in segments, as on GPU.\n\n"
    written(options.out, "windows", text + table(header, rows), figure)


if __name__ == "__main__":
    main()
