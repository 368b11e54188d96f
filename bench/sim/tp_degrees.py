"""Longest context and throughput of an instance by its degree, beside table 1 of the AMOEBA paper.

    python -m bench.sim.tp_degrees [--quick] [--out FOLDER]

The throughput is that at the largest rate at which P95 TTFT is below 10 s and P95 TPOT below 100 ms, with requests of
1K tokens. The lengths of answers are not given in the paper: with `OUTPUTS`, degree 1 comes near the paper's rate.
"""

import numpy as np

from bench.sim.amoeba import (
    PAPER_GB,
    PAPER_TABLE,
    SLO_TPOT,
    SLO_TTFT,
    TIGHT_GB,
    Figures,
    built,
    cluster,
    options_of,
    poisson,
    report,
    served,
    with_degrees,
)
from bench.sim.runs import table

INPUTS, OUTPUTS = 1024, 640
DEVICES = 4  # of the totals
SETTINGS = {  # name: (links, memory of a device in GB)
    "NVLink": ("nvlink", PAPER_GB),
    "NVLink, degree 1 holds about what the paper says": ("nvlink", TIGHT_GB),
    "links of the paper's loss": ("paper", PAPER_GB),
}


def throughput(degree: int, links: str, memory_gb: float, seconds: float, steps: int) -> float:
    """Return the output tokens/s of an instance at the largest rate within the SLO."""
    alone = with_degrees(cluster(devices=degree, links=links, memory_gb=memory_gb, max_tp=degree), [degree])
    low, high, best = 0.02, 8.0, 0.0
    for _ in range(steps):
        rate = (low * high) ** 0.5
        figures = Figures.of(served(built(alone), poisson(rate, seconds, INPUTS, OUTPUTS, np.random.default_rng(0))))
        if figures.p95_ttft < SLO_TTFT and figures.p95_tpot < SLO_TPOT:
            low, best = rate, figures.throughput
        else:
            high = rate
    return best


def rows(seconds: float, steps: int) -> list[tuple[object, ...]]:
    """Return the rows of the table."""
    found: list[tuple[object, ...]] = []
    for name, (links, memory_gb) in SETTINGS.items():
        memory = cluster(memory_gb=memory_gb).memory
        for degree, (length, rate) in PAPER_TABLE.items():
            alone = with_degrees(cluster(memory_gb=memory_gb, devices=degree, max_tp=degree), [degree])
            held = (alone.memory.plan.instances[0].kv_pages - 1) * memory.config.page_size
            own, count = throughput(degree, links, memory_gb, seconds, steps), DEVICES // degree
            lengths = f"{held / 1024:.1f}K", f"{memory.max_len(degree) / 1024:.1f}K", length
            found.append((name, degree, *lengths, f"{own:.0f}", rate, f"{count * own:.0f}", count * rate))
    return found


def main() -> None:
    """Measure each degree and report."""
    options = options_of(__doc__)
    seconds, steps = (60.0, 3) if options.quick else (600.0, 9)
    header = ("setting", "degree", "KV, tokens", "longest context", "paper", "tokens/s of an instance", "paper",
              f"on {DEVICES} GPUs", "paper")  # fmt: skip
    text = f"# Degrees of tensor parallelism, Qwen2.5-32B on {DEVICES} x H20, simulated\n\n"
    text += f"{INPUTS} tokens and {OUTPUTS} more; {PAPER_GB:g} and {TIGHT_GB:g} GB of each device.\n\n"
    report(options, "tp-degrees", text + table(header, rows(seconds, steps)) + "\n")


if __name__ == "__main__":
    main()
