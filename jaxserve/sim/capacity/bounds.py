"""Bounds that no number of instances, or no smaller number, can be better than, by the roofline alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from jaxserve.bench.metrics import MS
from jaxserve.core.numeric import ceil_div
from jaxserve.core.step_load import StepLoad
from jaxserve.sim.capacity.objectives import Objective, percentile_of
from jaxserve.sim.cluster import Cluster
from jaxserve.sim.cost_model import InstanceRoofline
from jaxserve.sim.request_columns import Floats
from jaxserve.sim.workload import SimWorkload

MIN_TOKENS = 8  # of a step for which the share of the roofline is looked up
SLACK = 0.95  # of the bound on instances: the bound leaves out little, but no more than that


@dataclass(frozen=True)
class Bounds:
    """The times of requests that have an instance for themselves, and the work of all of them."""

    ttft: Floats  # s, by request
    tpot: Floats  # s, by request; 0 for an answer of one token
    work: Floats  # s that an instance is busy for a request, at the least
    shared: bool  # prompts share prefixes, so that a request may be faster
    tokens: Floats  # of the prompt and the answer, by request
    max_model_len: int  # most tokens of a request that is not refused

    @classmethod
    def of(cls, cluster: Cluster, workload: SimWorkload) -> "Bounds":
        """Return the bounds of an instance of a cluster."""
        trace, buckets = workload.trace, cluster.memory.buckets
        steps = cluster.true_costs.of(cluster.memory.plan.instances[0])
        inputs = np.maximum(trace.input_tokens, 1).astype(float)
        outputs = np.maximum(trace.output_tokens, 1).astype(float)
        overheads = cluster.hardware.overheads
        alone = buckets.shape(1, 0, 0)
        decode = steps.seconds(StepLoad(alone.tokens, alone.rows, 1, 0, 0))
        tpot = np.where(outputs > 1, decode + steps.per_context * (inputs + outputs / 2), 0.0)
        prompts = _prefill_seconds(steps, cluster, inputs)
        ttft = overheads.request + overheads.prompt_token * inputs + overheads.host + prompts
        token = _least_per_token(steps, cluster)
        prompt = np.zeros(len(inputs)) if workload.shares else token * inputs + steps.per_prefill * inputs**2 / 2
        answer = token * (outputs - 1) + steps.per_context * (outputs - 1) * (inputs + outputs / 2)
        stages = len(cluster.memory.plan.instances[0].stages)
        work = (prompt + answer) / stages
        return cls(ttft, tpot, work, workload.shares, inputs + outputs, cluster.memory.max_model_len)

    def reason(self, objectives: Sequence[Objective]) -> str | None:
        """Return why requests miss an objective even if each has an instance for itself; None if they need not."""
        refused = self.tokens > self.max_model_len
        for each in objectives:
            if np.isinf(percentile_of(np.where(refused, np.inf, 0.0), each.percentile)):
                return (
                    f"{refused.sum():,} of {len(refused):,} requests are refused: they have up to "
                    f"{self.tokens.max():,.0f} tokens, and a sequence {self.max_model_len:,} (max_model_len)"
                )
            if each.metric == "ttft" and not self.shared:
                floor = float(np.percentile(self.ttft, each.percentile)) * MS
            elif each.metric == "tpot" and self.tpot.any():
                floor = float(np.percentile(self.tpot[self.tpot > 0], each.percentile)) * MS
            else:
                continue
            if floor > each.limit:
                return f"{each.name} cannot be below {floor:,.4g} ms even without other requests"
        return None

    def instances(self, seconds: float, share: float) -> int:
        """Return how many instances it takes at least to end this share of the requests within `seconds`."""
        work = np.sort(self.work)[: ceil(share * len(self.work))]
        return max(1, ceil(SLACK * float(work.sum()) / seconds))


def _prefill_seconds(steps: InstanceRoofline, cluster: Cluster, inputs: Floats) -> Floats:
    """Return the least time of the steps that compute each prompt alone."""
    buckets = cluster.memory.buckets
    step = buckets.max_tiles * buckets.tile
    full = buckets.shape(0, buckets.max_tiles, 0, 1)
    full_seconds = steps.fixed(full.tokens, full.rows, 0)
    seconds = np.zeros(len(inputs))
    by_tiles: dict[int, float] = {}
    for index, length in enumerate(inputs.astype(int).tolist()):
        whole, rest = divmod(length, step)
        tiles = ceil_div(rest, buckets.tile)
        if tiles and tiles not in by_tiles:
            shape = buckets.shape(0, tiles, 0, 1)
            by_tiles[tiles] = steps.fixed(shape.tokens, shape.rows, 0)
        seconds[index] = whole * full_seconds + by_tiles.get(tiles, 0.0)
    stages = len(cluster.memory.plan.instances[0].stages)
    # Chunks of a long prompt are in different stages at once.
    return (seconds + steps.per_prefill * inputs**2 / 2) / stages


def _least_per_token(steps: InstanceRoofline, cluster: Cluster) -> float:
    """Return the least time of a token in a step of any size."""
    buckets = cluster.memory.buckets
    most = buckets.max_tiles * buckets.tile + buckets.max_num_seqs
    sizes = [size for size in (MIN_TOKENS << power for power in range(most.bit_length())) if size < most]
    return min(steps.fixed(size, 1, 0) / size for size in (*sizes, most))
