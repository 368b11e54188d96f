"""MorphServe's table of static mixtures, simulated: the first token's P95 and the SLO's violations by layers in int4.

    python -m bench.sim.int4_layers [--traces FOLDER] [--scale 5.1]

Llama-3-8B on an L4, arrivals of a 72-second window of BurstGPT slowed by 1.75, as the paper has it (sec. 4). What the
lengths of its prompts and answers were is not told for this table: the window's own ones are multiplied by one factor,
which is chosen so that full precision comes out near the reported time. The other rows follow.
"""

from matplotlib import pyplot as plt

from bench.sim.runs import parser, simulated, table, written
from jaxserve.bench.options import TraceOptions
from jaxserve.sim.options import ClusterOptions

WINDOW = "burstgpt1_72s_744286.csv.gz"
REPORTED = {0: (5.65, 12.7), 8: (2.61, 4.2), 16: (1.74, 0.0), 32: (1.62, 0.0)}  # layers: P95 TTFT in s, violations in %
SLO = 2.0  # s


def main() -> None:
    """Simulates each mixture and reports."""
    made = parser(__doc__)
    made.add_argument("--scale", type=float, default=5.1, help="factor on the tokens of prompts and answers")
    options = made.parse_args()
    lengths = {"scale_lengths": options.scale, "stretch": 1.75}
    if options.traces is not None:
        trace = TraceOptions(trace=options.traces / WINDOW, **lengths)
    else:
        trace = TraceOptions(synthetic="burstgpt", duration=72.0, rate=105 / 72, **lengths)
    rows, seen = [], {}
    for layers, (reported_ttft, reported_violations) in REPORTED.items():
        mixture = f"0-{layers - 1}:int4" if layers else None
        cluster = ClusterOptions(model="llama-3-8b", hardware="l4", layer_precision=mixture, max_model_len=8192)
        result = simulated(cluster, trace, label=f"{layers} layers in int4", slo_s=SLO)
        ttft, violations = result["p95_ttft_ms"] / 1e3, 100 * result["slo_violation_rate"]
        seen[layers] = (ttft, violations)
        rows.append(
            (layers, f"{ttft:.2f}", f"{violations:.1f}", f"{result['median_tpot_ms']:.0f}", result["kv_pages"],
             f"{reported_ttft:.2f}", f"{reported_violations:.1f}")
        )  # fmt: skip
    header = ("layers in int4", "P95 TTFT, s", "violations, %", "TPOT median, ms", "KV pages", "reported P95 TTFT, s",
              "reported violations, %")  # fmt: skip
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for number, (axis, title) in enumerate(zip(axes, ("P95 TTFT, s", "SLO violations, %"), strict=True)):
        axis.plot(list(seen), [values[number] for values in seen.values()], "o-", label="simulated")
        axis.plot(list(REPORTED), [values[number] for values in REPORTED.values()], "s--", label="reported")
        axis.set(xlabel="layers in int4", title=title, xticks=list(REPORTED), ylim=(0, None))
        axis.legend()
    where = "the published window" if options.traces is not None else "a generated trace with its profile"
    text = f"# Layers in int4, Llama-3-8B on an L4, simulated\n\nArrivals of BurstGPT ({where}), slowed by 1.75, its "
    text += f"lengths times {options.scale:g}; SLO {SLO:g} s to the first token.\n\n"
    written(options.out, "sim-int4-layers", text + table(header, rows), figure)


if __name__ == "__main__":
    main()
