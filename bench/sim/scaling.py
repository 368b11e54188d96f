"""The cost of a simulated request as the cluster grows, with and without adaptation, and of a million requests.

    python -m bench.sim.scaling [--instances 1,10,100,1000] [--requests 20000] [--million]
    python -m bench.sim.scaling --policies static,morph,morph-performance [--instances 1,8,64,1000] [--each 120]

The first command simulates Llama-3-8B on A100s, each instance under the same load (6 requests/s with 512 prompt tokens
and 128 answer tokens). The second one simulates it on L4s with the MorphServe paper's kernels (l4-marlin) that full
precision overloads: 1.3 requests/s with 1024 prompt tokens and 256 answer tokens for each instance, and an objective of
2 s for the first token.

Seconds are the process's CPU time; memory is its peak resident memory. Each size runs in its own process.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from bench.sim.runs import parser, table, written
from jaxserve.bench.options import ArrivalOptions, DatasetOptions
from jaxserve.sim.options import ClusterOptions, FigureOptions
from jaxserve.sim.run import SimExperiment, run_simulation

RATE = 6.0  # requests/s for each instance
OVERLOAD = 1.3  # requests/s for each instance, of the longer requests
SLO = 2.0  # s
INT4 = "int4"  # the "policy" of full precision's peer: all layers in int4


def measured(instances: int, requests: int, policy: str | None = None) -> dict[str, Any]:
    """Simulate in this process and return the figures. With a policy the instances are overloaded."""
    rate, hardware, lengths = (RATE, "a100-80", (512, 128)) if policy is None else (OVERLOAD, "l4-marlin", (1024, 256))
    chosen: dict[str, Any] = {} if policy is None else {"slo_ttft": SLO}
    if policy == INT4:
        chosen |= {"precision": "int4", "head_precision": "bfloat16"}
    elif policy is not None:
        chosen |= {"policy": policy}
    cluster = ClusterOptions(
        model="llama-3-8b", hardware=hardware, cluster=str(instances), max_model_len=4096, **chosen
    )
    dataset = DatasetOptions(
        num_prompts=requests,
        input_len=str(lengths[0]),
        output_len=str(lengths[1]),
        range_ratio=0.5 if policy is None else 0.0,
    )
    figures = FigureOptions(detail=False, metrics_interval=0, goodput=[f"ttft:{SLO * 1e3:g}"])
    experiment = SimExperiment(cluster, dataset, ArrivalOptions(request_rate=rate * instances), figures=figures)
    begin = time.process_time()
    result = run_simulation(experiment, sys.argv)
    seconds = time.process_time() - begin
    assert result["completed"] == requests, result["failed"]
    return {
        "policy": policy or "static",
        "violated": 100 * result["slo_violation_rate"],
        "p95_ttft_ms": result["p95_ttft_ms"],
        "decisions": len(result.get("decisions", ())),
        "instances": instances,
        "requests": requests,
        "seconds": seconds,
        "us_per_request": seconds / requests * 1e6,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "mean_ttft_ms": result["mean_ttft_ms"],
        "median_tpot_ms": result["median_tpot_ms"],
    }


def in_a_process(*arguments: object) -> dict[str, Any]:
    """Return what `measured` returns, from a process of its own."""
    command = [sys.executable, "-m", "bench.sim.scaling", "--one", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found, flush=True)
    return found


def compare_sizes(sizes: list[tuple[int, int]], out: Path) -> None:
    """Measure each size without adaptation and report."""
    found = [in_a_process(*size) for size in sizes]
    header = ("instances", "requests", "seconds", "us per request", "memory, MB", "mean TTFT, ms", "TPOT median, ms")
    rows = [
        (f"{f['instances']:,}", f"{f['requests']:,}", f"{f['seconds']:.1f}", f"{f['us_per_request']:.0f}",
         f"{f['memory_mb']:.0f}", f"{f['mean_ttft_ms']:.1f}", f"{f['median_tpot_ms']:.2f}")
        for f in found
    ]  # fmt: skip
    figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axis.semilogx([f["instances"] for f in found], [f["us_per_request"] for f in found], "o")
    axis.set(xlabel="instances", ylabel="µs per simulated request", ylim=(0, None))
    written(out, "scaling", "# Cost of a simulated request\n\n" + table(header, rows), figure)


def compare_policies(policies: list[str], instances: list[int], each: int, out: Path) -> None:
    """Measure each policy on each number of instances and report."""
    found = [in_a_process(count, count * each, policy) for policy in policies for count in instances]
    header = ("policy", "instances", "SLO violated, %", "TTFT P95, s", "decisions", "ms per request", "memory, MB")
    rows = [
        (f["policy"], f"{f['instances']:,}", f"{f['violated']:.1f}", f"{f['p95_ttft_ms'] / 1e3:.2f}", f["decisions"],
         f"{f['us_per_request'] / 1e3:.2f}", f"{f['memory_mb']:.0f}")
        for f in found
    ]  # fmt: skip
    figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for policy in policies:
        own = [f for f in found if f["policy"] == policy]
        axis.semilogx([f["instances"] for f in own], [f["violated"] for f in own], "o-", label=policy)
    axis.set(xlabel="instances", ylabel="SLO violations, %", ylim=(0, None))
    axis.legend()
    text = f"# Adaptation as the cluster grows\n\nLlama-3-8B on l4-marlin, SLO {SLO:g} s.\n\n"
    written(out, "scaling-policies", text + table(header, rows), figure)


def main() -> None:
    """Measure each size in its own process and report."""
    made = parser(__doc__)
    made.add_argument("--instances")
    made.add_argument("--requests", type=int, default=20_000)
    made.add_argument("--million", action="store_true", help="also 1,000,000 requests on 64 instances")
    made.add_argument("--policies", help="compare these policies; int4 is static int4")
    made.add_argument("--each", type=int, default=120, help="requests for each instance, with --policies")
    made.add_argument("--one", nargs="+", metavar="ARGUMENT", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.one:
        instances, requests, *policy = options.one
        print(json.dumps(measured(int(instances), int(requests), *policy)))
    elif options.policies:
        counts = [int(text) for text in (options.instances or "1,8,64,1000").split(",")]
        compare_policies(options.policies.split(","), counts, options.each, options.out)
    else:
        sizes = [(int(text), options.requests) for text in (options.instances or "1,10,100,1000").split(",")]
        compare_sizes([*sizes, *([(64, 1_000_000)] if options.million else [])], options.out)


if __name__ == "__main__":
    main()
