"""The cause that limits a simulated cluster: its KV memory, its slots, or what its steps spend their time on."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxserve.core.numeric import ceil_div
from jaxserve.core.step_load import StepLoad
from jaxserve.sim.cluster import Cluster
from jaxserve.sim.cost_model import StepParts
from jaxserve.sim.host_work import HostWork
from jaxserve.sim.request_columns import RequestColumns

FULL = 0.95  # share of the KV pages from which on memory limits what runs at once
WAITING_SHARE = 0.05  # of the samples with requests that wait
NAMES = {
    "compute": "compute",
    "bandwidth": "memory bandwidth",
    "links": "links between devices",
    "host": "host and overheads",
}


def limit_of(cluster: Cluster, columns: RequestColumns, series: Mapping[str, Sequence[float]]) -> str:
    """Return what limits a cluster under the load of a run.

    Where requests have waited while KV pages or slots were used up, these limit. Otherwise it is what most of the time
    of the steps is spent on.
    """
    instances = cluster.config.dp
    waiting = np.array(series.get("num_requests_waiting", ()))
    running = np.array(series.get("num_requests_running", ()))
    usage = np.array(series.get("kv_cache_usage_perc", ()))
    slots = instances * cluster.memory.buckets.max_num_seqs
    some_wait = waiting > 0
    if len(waiting) and some_wait.mean() >= WAITING_SHARE:
        if np.median(usage[some_wait]) >= FULL:
            return "KV memory"
        if np.median(running[some_wait]) >= FULL * slots:
            return "slots (--max-num-seqs)"
    parts = _spent(cluster, columns)
    name = max(NAMES, key=lambda name: getattr(parts, name))
    return f"{NAMES[name]}, {getattr(parts, name) / parts.seconds:.0%} of a step"


def _spent(cluster: Cluster, columns: RequestColumns) -> StepParts:
    """Return what the time of the run's steps was spent on, as if all steps that decode were alike."""
    done = ~np.isnan(columns.last_s)
    buckets, plan = cluster.memory.buckets, cluster.memory.plan.instances[0]
    steps = cluster.true_costs.of(plan)
    inputs, outputs = columns.input_tokens[done], columns.output_tokens[done]
    lasts, firsts = columns.last_s[done], columns.first_s[done]
    total = StepParts()
    whole = buckets.max_tiles * buckets.tile
    for length in inputs.tolist():  # prompts, computed in whole steps of their own
        tiles = min(ceil_div(length, buckets.tile), buckets.max_tiles)
        shape = buckets.shape(0, tiles, 0, 1)
        chunks = max(length / whole, 1.0)
        total += steps.parts(StepLoad(shape.tokens, shape.rows, 0, 0, length * (length + 1) / chunks)) * chunks
    gaps = int((outputs - 1).sum())
    span = float(lasts.max() - columns.arrival_s[0]) if len(lasts) else 0.0
    if not gaps or not span:
        return total if total.seconds else StepParts(compute=1.0)
    batch = float((lasts - firsts).sum()) / span / cluster.config.dp
    decodes = int(min(max(round(batch), 1), buckets.max_num_seqs))
    context = float(np.average(inputs + outputs / 2, weights=np.maximum(outputs - 1, 0)))
    shape = buckets.shape(decodes, 0, 0)
    load = StepLoad(shape.tokens, shape.rows, decodes, int(decodes * context), 0)
    step = steps.parts(load)
    work = HostWork.of(cluster.hardware.overheads, fused=plan if cluster.config.fuse is not False else None)
    if work is not None:  # the host prepares a step while another one runs
        step += StepParts(host=max(0.0, work.seconds(plan, load, 0.0) - step.seconds))
    return total + step * (gaps / decodes)
