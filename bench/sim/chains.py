"""Policies alone and chained, on the same traces under the same memory: Qwen2.5-14B on 8 x A800 in one host.

    python -m bench.sim.chains [--trace FILE] [--quick] [--out FOLDER]

The traces are a published one, or a random one of the same form; a random one with long prompts; and one in which
bursts of short requests alternate with single requests that no instance can hold.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.sim.amoeba import parser_of, report
from bench.sim.burst_runs import BATCHED, DEVICES, PLENTY_GB, Outcome, Setting, System, calibrated, cluster_of
from bench.sim.burst_traces import seconds_to_compute, with_giants
from bench.sim.drops import facts, setting_of, simulated, trace_of
from bench.sim.runs import table

GIANT = 60_000  # tokens of a prompt
TP, PP, MORPH = {"max_tp": 4}, {"max_pp": DEVICES}, {}
SYSTEMS = {
    "static": System(),
    "morph": System({"policy": "morph"}),
    "tp_transform": System({"policy": "tp_transform"} | TP),
    "param_drop": System({"policy": "param_drop"} | PP),
    "param_drop+morph": System({"policy": "param_drop+morph"} | PP),
    "tp_transform+param_drop": System({"policy": "tp_transform+param_drop"} | TP | PP),
    "tp_transform+morph": System({"policy": "tp_transform+morph"} | TP),
}
SCALE = 5  # of the P50 of static, as the paper has for chats


def settings(trace: Path | None, quick: bool) -> dict[str, Setting]:
    """Return the settings by their names."""
    alternating = calibrated(
        trace_of(None, "longbench", quick),
        rng=np.random.default_rng(0),
        hosts=1,
        longest=None,
        further=lambda scaled: with_giants(scaled, GIANT, 12.0),
    )
    first = "arrivals of the trace, short prompts" if trace else "random arrivals, short prompts"
    return {
        first: setting_of(trace_of(trace, "burstgpt", quick), hosts=1),
        "random arrivals, long prompts": setting_of(trace_of(None, "longbench", quick), hosts=1),
        "bursts and single requests that no instance can hold": alternating,
    }


def attained(each: Outcome, base: Outcome) -> float:
    """Return the share of the requests within `SCALE` times the P50 of `base`, or of what their prompts take alone."""
    cluster = cluster_of(PLENTY_GB)
    cost = cluster.true_costs.of(cluster.memory.plan.instances[0])
    alone = seconds_to_compute(each.prompts, np.zeros(len(each.prompts)), cost, BATCHED)
    ttft = np.maximum(float(np.median(base.ttft)), alone)
    return each.within(SCALE * ttft, SCALE * float(np.median(base.tpot)))


def rows(found: Mapping[str, Outcome]) -> Iterator[Sequence[object]]:
    """Yield the figures of each policy, and the difference of chains to the best of their parts."""
    p99 = {name: each.percentile_ttft(99) for name, each in found.items()}
    share = {name: attained(each, found["static"]) for name, each in found.items()}
    for name, each in found.items():
        parts = name.split("+")
        q50, q99 = 1e3 * np.percentile(each.tpot, [50, 99])
        apart = ["-", "-"]
        if len(parts) > 1:
            best = min(p99[part] for part in parts)
            apart = [
                f"{p99[name] / best - 1:+.1%}" if np.isfinite(best) else "-",
                f"{100 * (share[name] - max(share[part] for part in parts)):+.1f}",
            ]
        yield (
            name, f"{each.percentile_ttft(50):.2f}", f"{p99[name]:.2f}", apart[0], f"{100 * share[name]:.1f}", apart[1],
            f"{q50:.0f}", f"{q99:.0f}", f"{each.throughput():.0f}", each.preempted, each.refused,
            "yes" if each.restored else "no",
        )  # fmt: skip


HEADER = ("policy", "TTFT P50, s", "P99, s", "beside the best part", f"within {SCALE} x, %",
          "beside the best part, points", "TPOT P50, ms", "P99, ms", "tokens/s", "preemptions", "refused",
          "restored")  # fmt: skip


def main() -> None:
    """Simulate all policies and report."""
    made = parser_of(__doc__)
    made.add_argument("--trace", type=Path, help="arrivals; default: random ones")
    options = made.parse_args()
    text = "# Policies alone and chained, Qwen2.5-14B on 8 x A800 in one host, simulated\n\n"
    text += (
        f"Within {SCALE} x: TTFT at most {SCALE} times the larger of static's P50 and the time that the prompt takes "
    )
    text += f"alone, TPOT at most {SCALE} times static's P50. Refused requests are outside, and wait for ever.\n\n"
    for name, setting in settings(options.trace, options.quick).items():
        found = simulated(SYSTEMS, setting)
        text += f"## {name[0].upper()}{name[1:]}\n\n{facts(setting)}\n{table(HEADER, rows(found))}\n\n"
    report(options, "chains", text)


if __name__ == "__main__":
    main()
