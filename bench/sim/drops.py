"""A burst that KV pages do not suffice for, and what instances do about it: Qwen2.5-14B on 8 x A800, after KunServe.

    python -m bench.sim.drops [--quick] [--memory-gb GB] [--rate RATE] [--out FOLDER]

Requests have the mean lengths of KunServe's LongBench workload and come at random, with two overloads in 640 s. The
real BurstGPT trace is not here in this length. Each host has one GPU, and pages go over RDMA. Two systems of the paper
are missing: nothing here swaps KV to the host or moves requests between instances for balance.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.sim.amoeba import parser_of, report, served
from bench.sim.runs import table
from jaxserve.control.exchange import PageExchange
from jaxserve.core.config import EngineConfig
from jaxserve.planning import workspace
from jaxserve.sim.build import BuiltSimulation, build_simulation
from jaxserve.sim.cluster import resolve_cluster
from jaxserve.sim.hardware import load_hardware
from jaxserve.sim.pipeline import bubbles
from jaxserve.sim.shape import ModelShape
from jaxserve.sim.simulation import Answered, SimRequest

DEVICES, BATCHED = 8, 2048
INPUTS, OUTPUTS = 5900, 499  # tokens, means
LONGEST = 16_000  # tokens of a prompt
OVERLOADS = ((0.2, 0.27), (0.62, 0.69))  # shares of the trace
SCALES = (1, 2, 3, 4, 5, 6, 8, 10)  # of the P50 of recomputation
AT_ONCE = 10**9  # rows
SYSTEMS: dict[str, dict[str, Any]] = {  # name: options of the engine
    "recomputation": {},
    "groups of 2 from the start": {"pp": 2, "dp": DEVICES // 2},
    "drop, all KV at once, equal tokens": {"policy": "param_drop", "max_pp": DEVICES, "microbatches": "tokens"},
    "+ coordinated exchange": {"policy": "param_drop", "max_pp": DEVICES, "microbatches": "tokens"},
    "+ lookahead: param_drop": {"policy": "param_drop", "max_pp": DEVICES},
    "morph": {"policy": "morph"},
    "tp_transform": {"policy": "tp_transform", "max_tp": 4},
    "param_drop+morph": {"policy": "param_drop+morph", "max_pp": DEVICES},
    "tp_transform+param_drop": {"policy": "tp_transform+param_drop", "max_tp": 4, "max_pp": DEVICES},
}
PAPER = """Reported (KunServe, figures 13 and 14, section 5): P99 TTFT 12.7 to 72.2 times better than the baselines;
drop alone 11.7 times better than recomputation, coordinated exchange 1.5 times better than that; bubbles 21.9 % with
equal tokens and 8.3 % with lookahead, throughput +20 %; P50 TPOT 15.8 to 22.7 % worse; almost all requests within 4
times P50.
"""


def trace(rate: float, overload: float, seconds: float, seed: int = 0) -> list[SimRequest]:
    """Return requests at a rate, and at `overload` times that rate in the overloads."""
    rng, requests, time = np.random.default_rng(seed), [], 0.0
    while time < seconds:
        high = any(first <= time / seconds < last for first, last in OVERLOADS)
        inputs = int(np.clip(rng.lognormal(np.log(INPUTS) - 0.18, 0.6), 64, LONGEST))
        outputs = int(np.clip(rng.lognormal(np.log(OUTPUTS) - 0.125, 0.5), 8, 2000))
        requests.append(SimRequest(time, inputs, outputs))
        time += float(rng.exponential(1 / (rate * (overload if high else 1.0))))
    return requests


def built(memory_gb: float, options: dict[str, Any]) -> BuiltSimulation:
    """Return a simulation of a system. Morph has an SLO of 5 s for the first token."""
    given = {"dp": DEVICES, "memory_gb": memory_gb, "prefix_caching": False, "max_num_batched_tokens": BATCHED}
    given |= {"max_model_len": 20_000, "max_queued_requests": 10**6, "max_queued_tokens": 10**10}
    if "morph" in options.get("policy", ""):
        given["slo_ttft"] = 5.0
    hardware = replace(load_hardware("a800"), devices_per_host=1)
    cluster = resolve_cluster(EngineConfig(**given | options), ModelShape.load("qwen2.5-14b"), hardware)
    return build_simulation(cluster, detailed=False, interval=0.0)


@contextmanager
def exchanged_at_once(name: str) -> Iterator[None]:
    """Let groups exchange all pages in one chunk, whatever memory that takes, for the system that is to show it."""
    if "at once" not in name:
        yield
        return
    with patch.object(PageExchange, "_chunk", lambda _: AT_ONCE):
        yield


@dataclass(frozen=True)
class Outcome:
    """What a system made of the trace."""

    ttft: np.ndarray
    tpot: np.ndarray
    tokens: float  # of output, each second
    refused: int
    preempted: int
    idle: float | None  # bubbles
    groups: int  # times that the set of instances has changed
    grouped: float  # share of the time
    restored: bool

    def within(self, ttft: float, tpot: float) -> float:
        """Return the share of the requests whose times are no longer."""
        return float(np.mean((self.ttft <= ttft) & (self.tpot <= tpot)))


def outcome(name: str, requests: Sequence[SimRequest], memory_gb: float) -> Outcome:
    """Simulate a system."""
    system = built(memory_gb, SYSTEMS[name])
    with exchanged_at_once(name):
        answers: list[Answered] = served(system, requests)
    done = [answer for answer in answers if answer.error is None]
    first, last = (np.array([getattr(answer, at) for answer in done]) for at in ("first_token", "last_token"))
    lengths = np.array([answer.output_tokens for answer in done])
    sets = [] if system.control is None else system.control.sets
    ends = [*(each.time for each in sets[1:]), float(last.max())][: len(sets)]
    grouped = sum(end - each.time for each, end in zip(sets, ends, strict=True) if len(each.instances) < DEVICES)
    return Outcome(
        first - np.array([answer.request.arrival for answer in done]),
        (last - first) / np.maximum(lengths - 1, 1),
        float(lengths.sum() / last.max()),
        len(answers) - len(done),
        int(system.simulation.front.snapshot().preemptions),
        bubbles(system.pipelines),
        max(0, len(sets) - 1),
        grouped / float(last.max()),
        system.control is None or system.control.settled_since is not None,
    )


def rows(found: dict[str, Outcome]) -> Iterator[tuple[object, ...]]:
    """Yield the figures of each system."""
    base = found["recomputation"]
    for name, each in found.items():
        p50, p99 = np.percentile(each.ttft, [50, 99])
        q50, q99 = 1e3 * np.percentile(each.tpot, [50, 99])
        yield (
            name, f"{p50:.2f}", f"{p99:.2f}", f"{np.percentile(base.ttft, 99) / p99:.1f} x", f"{q50:.0f}", f"{q99:.0f}",
            f"{each.tokens:.0f}", each.preempted, each.refused,
            "-" if each.idle is None else f"{each.idle:.1%}", each.groups, f"{each.grouped:.0%}",
            "yes" if each.restored else "no",
        )  # fmt: skip


def main() -> None:
    """Simulate all systems and report."""
    made = parser_of(__doc__)
    made.add_argument("--memory-gb", type=float, default=50.0, help="memory of a device")
    made.add_argument("--rows", type=int, help="rows of pages that devices have room for in an exchange, at least")
    made.add_argument("--rate", type=float, default=2.5, help="requests/s outside of the overloads")
    made.add_argument("--overload", type=float, default=2.0, help="factor on the rate in the overloads")
    options = made.parse_args()
    if options.rows is not None:
        workspace.EXCHANGED_ROWS = options.rows
    requests = trace(options.rate, options.overload, 60.0 if options.quick else 640.0)
    found = {name: outcome(name, requests, options.memory_gb) for name in SYSTEMS}
    header = ("system", "TTFT P50, s", "P99, s", "P99 better by", "TPOT P50, ms", "P99, ms", "tokens/s", "preemptions",
              "refused", "bubbles", "sets changed", "time in groups", "restored")  # fmt: skip
    base = found["recomputation"]
    ttft, tpot = float(np.median(base.ttft)), float(np.median(base.tpot))
    slo = [
        (name, *(f"{100 * each.within(scale * ttft, scale * tpot):.1f}" for scale in SCALES))
        for name, each in found.items()
    ]
    text = "# Bursts absorbed by dropping layers, Qwen2.5-14B on 8 x A800, simulated\n\n"
    text += f"{len(requests)} requests at {options.rate:g}/s, {options.overload:g} times that in two overloads; "
    text += f"{options.memory_gb:g} GB of each device, room for {workspace.EXCHANGED_ROWS} rows.\n\n"
    text += f"{table(header, rows(found))}\n\n{PAPER}\n"
    text += "## Requests within a multiple of recomputation's P50, %\n\n"
    text += f"Its P50 is {ttft:.2f} s (TTFT) and {1e3 * tpot:.0f} ms (TPOT).\n\n"
    report(options, "drops", text + table(("system", *(f"{scale} x" for scale in SCALES)), slo) + "\n")


if __name__ == "__main__":
    main()
