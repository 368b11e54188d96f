"""The cost of a simulated request as the cluster grows, and of a million requests.

    python -m bench.sim.scaling [--instances 1,10,100,1000] [--requests 20000] [--million]

Llama-3-8B on A100s, each instance under the same load (6 requests/s with 512 prompt tokens and 128 answer tokens).
Seconds are the process's CPU time; memory is its peak resident memory. Each size runs in its own process.
"""

import json
import resource
import subprocess
import sys
import time
from typing import Any

from matplotlib import pyplot as plt

from bench.sim.runs import parser, table, written
from jaxserve.bench.options import ArrivalOptions, DatasetOptions
from jaxserve.sim.options import ClusterOptions, FigureOptions
from jaxserve.sim.run import SimExperiment, run_simulation

RATE = 6.0  # requests/s for each instance


def measured(instances: int, requests: int) -> dict[str, Any]:
    """Simulate in this process and return the figures."""
    cluster = ClusterOptions(model="llama-3-8b", hardware="a100-80", cluster=str(instances), max_model_len=4096)
    dataset = DatasetOptions(num_prompts=requests, input_len="512", output_len="128", range_ratio=0.5)
    figures = FigureOptions(detail=False, metrics_interval=0)
    experiment = SimExperiment(cluster, dataset, ArrivalOptions(request_rate=RATE * instances), figures=figures)
    begin = time.process_time()
    result = run_simulation(experiment, sys.argv)
    seconds = time.process_time() - begin
    assert result["completed"] == requests, result["failed"]
    return {
        "instances": instances,
        "requests": requests,
        "seconds": seconds,
        "us_per_request": seconds / requests * 1e6,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "mean_ttft_ms": result["mean_ttft_ms"],
        "median_tpot_ms": result["median_tpot_ms"],
    }


def main() -> None:
    """Measure each size in its own process and report."""
    made = parser(__doc__)
    made.add_argument("--instances", default="1,10,100,1000")
    made.add_argument("--requests", type=int, default=20_000)
    made.add_argument("--million", action="store_true", help="also 1,000,000 requests on 64 instances")
    made.add_argument(
        "--one", nargs=2, type=int, metavar=("INSTANCES", "REQUESTS"), help="simulate this size alone and print JSON"
    )
    options = made.parse_args()
    if options.one:
        print(json.dumps(measured(*options.one)))
        return
    sizes = [(int(text), options.requests) for text in options.instances.split(",")]
    found = []
    for size in [*sizes, *([(64, 1_000_000)] if options.million else [])]:
        command = [sys.executable, "-m", "bench.sim.scaling", "--one", *map(str, size)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(found[-1], flush=True)
    header = ("instances", "requests", "seconds", "us per request", "memory, MB", "mean TTFT, ms", "TPOT median, ms")
    rows = [
        (f"{f['instances']:,}", f"{f['requests']:,}", f"{f['seconds']:.1f}", f"{f['us_per_request']:.0f}",
         f"{f['memory_mb']:.0f}", f"{f['mean_ttft_ms']:.1f}", f"{f['median_tpot_ms']:.2f}")
        for f in found
    ]  # fmt: skip
    figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axis.semilogx([f["instances"] for f in found], [f["us_per_request"] for f in found], "o")
    axis.set(xlabel="instances", ylabel="µs per simulated request", ylim=(0, None))
    written(options.out, "scaling", "# Cost of a simulated request\n\n" + table(header, rows), figure)


if __name__ == "__main__":
    main()
