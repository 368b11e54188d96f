"""A burst that KV pages do not suffice for, and what systems do about it: Qwen2.5-14B on 8 x A800, after KunServe.

    python -m bench.sim.drops [--trace FILE] [--lengths NAME ...] [--memory-gb GB] [--quick]

Arrivals are those of a published trace with two overloads in 640 s, or random ones of the same form. Lengths are those
of the trace (`own`), or have the means of KunServe's data sets. Each host has one GPU, and pages go over RDMA.

By default computing suffices for the busiest 10 s, and the memory follows (`bench.sim.burst_runs.calibrated`). With a
given memory the rate follows, and the table shows whether memory or computing limits.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.sim.amoeba import parser_of, report
from bench.sim.burst_runs import DEVICES, Outcome, Setting, System, calibrated, outcome
from bench.sim.burst_traces import LENGTHS, generated, published, with_lengths
from bench.sim.runs import table
from jaxserve.bench.traces.scaling import window
from jaxserve.bench.traces.trace import Trace

SCALES = range(1, 11)  # of the P50 of the best baseline
DROP = {"policy": "param_drop", "max_pp": DEVICES}
BASELINES = {
    "recomputation": System(),
    "swapping to the host": System(swaps=True),
    "migration": System(migrates=True),
}
SYSTEMS = BASELINES | {
    "groups of 2 from the start": System({"pp": 2, "dp": DEVICES // 2}),
    "drop, all KV at once, equal tokens": System(DROP | {"microbatches": "tokens"}, at_once=True),
    "+ coordinated exchange": System(DROP | {"microbatches": "tokens"}),
    "+ lookahead: param_drop": System(DROP),
    "memory that never runs out": System(plenty=True),
}
LIMITS = ("recomputation", "memory that never runs out")
PAPER = """Reported (KunServe, figures 13, 14 and 16): P99 TTFT 12.7 to 72.2 times better than the baselines; drop alone
11.7 times better than recomputation, coordinated exchange 1.5 times better than that; bubbles 21.9 % with equal tokens
and 8.3 % with lookahead, throughput +20 %; P50 TPOT 15.8 to 22.7 % worse; almost no violation beyond 4 times P50.
"""


def trace_of(path: Path | None, lengths: str, quick: bool) -> Trace:
    """Return the trace of a file, or a random one of the same form."""
    rng, seconds = np.random.default_rng(0), 80.0 if quick else 640.0
    if path is None:
        made = generated(rng, seconds)
    else:
        made = published(path)
        made = window(made, 60.0, seconds) if quick else made
    return made if lengths == "own" else with_lengths(made, lengths, rng)


def setting_of(trace: Trace, memory_gb: float | None = None, hosts: int = DEVICES) -> Setting:
    """Return the calibrated setting of a trace, whose instances hold its longest request."""
    longest = 1000 * int(np.ceil((trace.input_tokens + trace.output_tokens).max() / 1000))
    return calibrated(trace, rng=np.random.default_rng(0), hosts=hosts, memory_gb=memory_gb, longest=longest)


def facts(setting: Setting) -> str:
    """Return what the calibration has found."""
    of, spans = setting.facts, ", ".join(f"{begin:.0f} to {end:.0f}" for begin, end in setting.overloads)
    return (
        f"{len(setting.requests)} requests, {of['requests/s']:.2f}/s. {setting.memory_gb:g} GB of each device, with KV "
        f"for {of['KV tokens'] / DEVICES:.0f} tokens: {of['KV over the average demand']:.2f} times the average demand. "
        f"The largest demand is {of['largest demand over KV']:.2f} times the KV, which it exceeds at "
        f"{spans or 'no time'} s. Requests take {of['mean compute']:.0%} of the devices' time to compute, those of the "
        f"busiest 10 s {of['busiest 10 s compute']:.0%}.\n"
    )


def latencies(found: Mapping[str, Outcome], setting: Setting) -> Iterator[Sequence[object]]:
    """Yield times and throughput of each system."""
    base = found["recomputation"]
    tpot = np.median(base.tpot)
    for name, each in found.items():
        p50, p99 = (each.percentile_ttft(percent) for percent in (50, 99))
        q50, q99 = np.percentile(each.tpot, [50, 99])
        inside = f"{each.throughput(setting.overloads):.0f}" if setting.overloads else "-"
        yield (
            name, f"{p50:.2f}", f"{p99:.2f}", f"{base.percentile_ttft(99) / p99:.1f} x", f"{1e3 * q50:.0f}",
            f"{q50 / tpot - 1:+.0%}", f"{1e3 * q99:.0f}", f"{each.throughput():.0f}", inside, each.preempted,
            each.refused,
        )  # fmt: skip


def groups(found: Mapping[str, Outcome], setting: Setting) -> Iterator[Sequence[object]]:
    """Yield what systems with groups did."""
    for name, each in found.items():
        idle = [each.bubbles(times) for times in (None, setting.overloads)]
        if idle[0] is None:
            continue
        first = [each.dropped_after(begin - 10) for begin, _ in setting.overloads]
        whole = [each.whole_after(end) for _, end in setting.overloads]
        took = [end - begin for begin, end in each.exchanges]
        yield (
            name, *("-" if share is None else f"{share:.1%}" for share in idle), f"{each.grouped():.0%}",
            ", ".join("never" if time is None else f"{time - 10:+.1f}" for time in first) if each.sets else "-",
            ", ".join("never" if time is None else f"{time:.0f}" for time in whole) if each.sets else "-",
            f"{np.median(took):.2f}, {max(took):.2f}" if took else "-",
        )  # fmt: skip


def within(found: Mapping[str, Outcome]) -> str:
    """Return the table of the requests within multiples of the best baseline's medians."""
    ttft = min(float(np.median(found[name].ttft)) for name in BASELINES)
    tpot = min(float(np.median(found[name].tpot)) for name in BASELINES)
    rows = [(name, *(f"{100 * each.within(n * ttft, n * tpot):.1f}" for n in SCALES)) for name, each in found.items()]
    words = f"The best P50 of a baseline is {ttft:.2f} s (TTFT) and {1e3 * tpot:.0f} ms (TPOT).\n\n"
    return words + table(("system", *(f"{scale} x" for scale in SCALES)), rows) + "\n"


def simulated(systems: Mapping[str, System], setting: Setting) -> dict[str, Outcome]:
    """Return the outcomes of systems, and say on stderr which one is simulated."""
    found = {}
    for name, system in systems.items():
        print(name, file=sys.stderr)
        found[name] = outcome(system, setting)
    return found


TIMES = ("system", "TTFT P50, s", "P99, s", "P99 better by", "TPOT P50, ms", "than recomputation", "P99, ms",
         "tokens/s", "in overloads", "preemptions", "refused")  # fmt: skip
GROUPS = ("system", "bubbles", "in overloads", "time in groups", "first group, s from the begin of overloads",
          "restored, s after their ends", "exchange, s: median, longest")  # fmt: skip


def section(name: str, setting: Setting, systems: Mapping[str, System]) -> str:
    """Return the report on one trace."""
    found = simulated(systems, setting)
    text = f"## Lengths: {name}\n\n{facts(setting)}\n{table(TIMES, latencies(found, setting))}\n\n"
    if systems is not SYSTEMS:
        return text
    text += f"{table(GROUPS, groups(found, setting))}\n\n"
    return text + f"Requests within a multiple of the best P50, %. {within(found)}\n"


def main() -> None:
    """Simulate all systems and report."""
    made = parser_of(__doc__)
    made.add_argument("--trace", type=Path, help="arrivals and lengths; default: random ones")
    made.add_argument("--lengths", nargs="+", choices=["own", *LENGTHS], default=["burstgpt"], help="of requests")
    made.add_argument(
        "--memory-gb", type=float, help="memory of a device, from which the rate follows; only what limits"
    )
    options = made.parse_args()
    systems = SYSTEMS if options.memory_gb is None else {name: SYSTEMS[name] for name in LIMITS}
    text = f"# Bursts absorbed by dropping layers, Qwen2.5-14B on 8 x A800, simulated\n\n{PAPER}\n"
    for name in options.lengths:
        setting = setting_of(trace_of(options.trace, name, options.quick), options.memory_gb)
        text += section(name, setting, systems)
    report(options, "drops" if options.memory_gb is None else "drops-limits", text)


if __name__ == "__main__":
    main()
