"""What a merge and a split move and how long they stop their instances, by layer and in all.

    python -m bench.sim.tp_costs [--quick] [--out FOLDER]

Qwen2.5-32B on H20 and Llama-3-8B on four H100, at several shares of the KV pages in use. The times follow from the
bytes on each link, the rates of the hardware files, and a latency for each call; beside them is the time of a step that
decodes 32 sequences of 1K tokens before the change. The last two columns are of one layer that changes between two
steps, while the instance serves: how long its KV takes, and as a share of a step.
"""

from bench.sim.amoeba import PAPER_GB, options_of, report
from bench.sim.runs import table
from jaxserve.control.movement import kv_movement, movement
from jaxserve.control.regroup import merged_plan, split_plans
from jaxserve.core.config import EngineConfig
from jaxserve.core.step_load import StepLoad
from jaxserve.sim.cluster import Cluster, resolve_cluster
from jaxserve.sim.hardware import load_hardware
from jaxserve.sim.shape import ModelShape

MACHINES = {"qwen2.5-32b": ("h20", PAPER_GB), "llama-3-8b": ("h100", None)}
USAGES = (0.0, 0.1, 0.5, 0.9)  # of the KV pages of the members
LOAD = StepLoad(32, 32, 32, 32 * 1024, 0)


def resolved(model: str) -> Cluster:
    """Return four instances of a model."""
    hardware, memory_gb = MACHINES[model]
    config = EngineConfig(dp=4, max_tp=4, memory_gb=memory_gb, prefix_caching=False)
    return resolve_cluster(config, ModelShape.load(model), load_hardware(hardware))


def rows_of(model: str) -> list[tuple[object, ...]]:
    """Return the rows of a model."""
    cluster, rows = resolved(model), []
    resources, start = cluster.resources, cluster.memory.plan.instances
    overhead = cluster.hardware.overheads.transition
    for count in (2, 4):
        members = start[:count]
        whole = merged_plan(members, "whole")
        parts = split_plans(whole, [f"part {number}" for number in range(count)])
        for before, after, what in ((members, [whole], "merge"), ([whole], parts, "split")):
            step = 1e3 * cluster.true_costs.of(before[0]).seconds(LOAD)
            for usage in USAGES:
                groups = int(usage * (members[0].kv_pages - 1))
                moved = movement(before, after, resources, groups)
                seconds = 1e3 * (moved.seconds(resources) + overhead)
                links = max(moved.links.values(), default=0)
                sizes = (
                    f"{links / 1e9:.2f}",
                    f"{moved.bytes_by_link / 1e9:.1f}",
                    f"{max(moved.peak.values()) / 1e6:.0f}",
                )
                times = f"{seconds / cluster.shape.num_layers:.2f}", f"{seconds:.0f}", f"{seconds / step:.1f}"
                kv = 1e3 * kv_movement(members, groups, resources).seconds(resources) / cluster.shape.num_layers
                rows.append((model, f"{what} {count}", f"{usage:.0%}", *sizes, *times, f"{kv:.2f}", f"{kv / step:.0%}"))
    return rows


def main() -> None:
    """Count what moves and report."""
    options = options_of(__doc__)
    header = ("model", "change", "KV in use", "GB on a link", "GB in all", "MB beside", "ms a layer", "ms",
              "decode steps", "ms between steps", "of a step")  # fmt: skip
    text = "# Merges and splits, simulated\n\n"
    rows = [row for model in MACHINES for row in rows_of(model)]
    report(options, "tp-costs", text + table(header, rows) + "\n")


if __name__ == "__main__":
    main()
