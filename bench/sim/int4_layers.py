"""MorphServe's table of static precision assignments, simulated: P95 TTFT and SLO violations by layers in int4.

    python -m bench.sim.int4_layers [--traces FOLDER] [--scale 5.1]

Llama-3-8B on an L4, with arrivals of a 72-second window of BurstGPT slowed by 1.75, as in the paper (section 4). The
paper does not report the lengths of prompts and answers for this table. The window's own lengths are multiplied by one
factor, chosen so that full precision comes out near the reported time; all other rows follow from that.

Prompts are products with many tokens. Whether int4 weights make these slower depends on the kernel, and no published
figures are of an L4. So there are two series: one with configs/hardware/l4-marlin.yaml (a tenth slower, as MARLIN), and
one in which these products take as long as with 16 bits. jaxserve has no such kernels for an L4: l4.yaml is slower.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from matplotlib import pyplot as plt

from bench.sim.runs import parser, simulated, table, written
from jaxserve.bench.options import TraceOptions
from jaxserve.bench.result import Result
from jaxserve.sim.hardware import Curve, load_hardware, to_yaml
from jaxserve.sim.options import ClusterOptions

WINDOW = "burstgpt1_72s_744286.csv.gz"
REPORTED = {0: (5.65, 12.7), 8: (2.61, 4.2), 16: (1.74, 0.0), 32: (1.62, 0.0)}  # layers: P95 TTFT in s, violations in %
SLO = 2.0  # s


def main() -> None:
    """Simulate each assignment and report."""
    made = parser(__doc__)
    made.add_argument("--scale", type=float, default=5.1, help="factor on the tokens of prompts and answers")
    options = made.parse_args()
    lengths = {"scale_lengths": options.scale, "stretch": 1.75}
    if options.traces is not None:
        trace = TraceOptions(trace=options.traces / WINDOW, **lengths)
    else:
        trace = TraceOptions(synthetic="burstgpt", duration=72.0, rate=105 / 72, **lengths)
    with tempfile.TemporaryDirectory() as folder:
        as_16_bits = Path(folder) / "l4.yaml"
        as_16_bits.write_text(_int4_as_16_bits())
        series = {
            "simulated": _series("l4-marlin", trace),
            "simulated, int4 as 16 bits": _series(str(as_16_bits), trace),
        }
    rows = []
    for layers, (reported_ttft, reported_violations) in REPORTED.items():
        one, other = (results[layers] for results in series.values())
        rows.append(
            (layers, f"{_ttft(one):.2f}", f"{_violated(one):.1f}", f"{_ttft(other):.2f}", f"{_violated(other):.1f}",
             f"{reported_ttft:.2f}", f"{reported_violations:.1f}", f"{one['median_tpot_ms']:.0f}", one["kv_pages"])
        )  # fmt: skip
    header = ("layers in int4", "P95 TTFT, s", "violations, %", "int4 as 16 bits: P95 TTFT, s", "violations, %",
              "reported: P95 TTFT, s", "violations, %", "TPOT median, ms", "KV pages")  # fmt: skip
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for index, (axis, figure_of, title) in enumerate(
        zip(axes, (_ttft, _violated), ("P95 TTFT, s", "SLO violations, %"), strict=True)
    ):
        for label, results in series.items():
            axis.plot(list(results), [figure_of(result) for result in results.values()], "o-", label=label)
        axis.plot(list(REPORTED), [values[index] for values in REPORTED.values()], "s--", label="reported")
        axis.set(xlabel="layers in int4", title=title, xticks=list(REPORTED), ylim=(0, None))
        axis.legend()
    where = "the published window" if options.traces is not None else "a generated trace with its profile"
    text = f"# Layers in int4, Llama-3-8B on an L4, simulated\n\nArrivals of BurstGPT ({where}), slowed by 1.75, its "
    text += f"lengths times {options.scale:g}; SLO {SLO:g} s to the first token.\n\n"
    written(options.out, "int4-layers", text + table(header, rows), figure)


def _series(hardware: str, trace: TraceOptions) -> dict[int, Result]:
    """Return a result for each number of layers in int4."""
    results = {}
    for layers in REPORTED:
        chosen = f"0-{layers - 1}:int4" if layers else None
        cluster = ClusterOptions(model="llama-3-8b", hardware=hardware, layer_precision=chosen, max_model_len=8192)
        results[layers] = simulated(cluster, trace, label=f"{layers} layers in int4", slo_s=SLO)
    return results


def _int4_as_16_bits() -> str:
    """Return the hardware file of an L4 whose int4 products reach the efficiency of 16-bit products."""
    known = load_hardware("l4-marlin")
    min_share = known.curve("bfloat16").knots[-1][1]
    knots = tuple((tokens, max(share, min_share)) for tokens, share in known.curve("int4").knots)
    return to_yaml(replace(known, efficiency={**known.efficiency, "int4": Curve(knots)}))


def _ttft(result: Result) -> float:
    return float(result["p95_ttft_ms"]) / 1e3


def _violated(result: Result) -> float:
    return 100 * float(result["slo_violation_rate"])


if __name__ == "__main__":
    main()
