"""Random worlds for properties of policies: machines, memory and traffic, each drawn from a seed.

A world says how much faster or slower fewer bits are, with few rows and with many, and what is short: slots or pages.
Its model is small (16 layers), so that a simulated minute takes a fraction of a second.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jaxserve.bench.traces.synthetic import synthetic
from jaxserve.bench.traces.trace import Trace
from jaxserve.core.config import EngineConfig
from jaxserve.planning.defaults import PLATFORMS
from jaxserve.sim.build import BuiltSimulation, build_simulation
from jaxserve.sim.cluster import Cluster, resolve_cluster
from jaxserve.sim.hardware import Curve, Hardware, Link, Overheads
from jaxserve.sim.run import simulate
from jaxserve.sim.shape import ModelShape
from jaxserve.sim.workload import SimWorkload

SHAPE = ModelShape(
    name="small",
    vocab_size=1024,
    hidden_size=512,
    num_layers=16,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=1536,
    max_position=1024,
    tie_embeddings=False,
)
FULL, QUANTISED = "bfloat16", ("int8", "int4", "int3")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
FEW, MANY = 4, 64  # rows up to which, and from which on, a relative cost is constant
SLO = 2.0  # s to the first token
SECONDS = 60.0  # of traffic
PROFILES = ("azure-conv", "azure-burst", "burstgpt")
LENGTH_SCALES = {"azure-conv": 0.2, "azure-burst": 0.15, "burstgpt": 1.0}  # to lengths that the small model can have
AT_ONCE = 96  # requests that measure a capacity
# What the time in fewer bits is multiplied by, with few rows and with many: ranges of factors.
FASTER, SLOWER = (0.5, 0.9), (1.1, 2.0)
SPEEDS = {
    "faster": (FASTER, FASTER),
    "slower": (SLOWER, SLOWER),
    "faster with few rows": (FASTER, SLOWER),
    "faster with many rows": (SLOWER, FASTER),
    "as fast": ((1.0, 1.0), (1.0, 1.0)),
}
SHORT = ("pages", "slots", "nothing")


@dataclass(frozen=True)
class Summary:
    """What the clients of a run have seen, and what the policy did."""

    violated: float  # share of the requests
    p95_ttft: float  # s
    decisions: int
    restored: bool  # the plan of the start is in force at the end


@dataclass(frozen=True, eq=False)
class World:
    """A machine, and the memory that the model has on it."""

    seed: int
    speed: str  # a key of SPEEDS
    short: str  # an element of SHORT
    hardware: Hardware
    max_num_seqs: int
    kv_pages: int

    def __str__(self) -> str:
        return f"world {self.seed}: {self.hardware.platform}, fewer bits {self.speed}, short of {self.short}"

    def config(self, policy: str = "static", instances: int = 1, **options: Any) -> EngineConfig:
        """Return the configuration of engines in this world, with any options of an `EngineConfig`."""
        known = {
            "policy": policy,
            "dp": instances,
            "slo_ttft": SLO,
            "max_num_seqs": self.max_num_seqs,
            "kv_pages": self.kv_pages,
            "prefix_caching": False,
            "max_queued_requests": 1_000_000,
        }
        return EngineConfig(**known | options)

    def cluster(self, policy: str = "static", instances: int = 1, **options: Any) -> Cluster:
        """Return `instances` engines in this world."""
        return resolve_cluster(self.config(policy, instances, **options), SHAPE, self.hardware)

    def build(self, policy: str = "static", instances: int = 1, **options: Any) -> BuiltSimulation:
        """Return a simulation of `instances` engines in this world."""
        return build_simulation(self.cluster(policy, instances, **options), detailed=False, interval=0)

    @cached_property
    def capacities(self) -> Mapping[str, float]:
        """The requests/s that an instance in full precision answers if all arrive at once, by profile."""
        return {profile: self._capacity(profile) for profile in PROFILES}

    def traffic(self, load: float, seed: int, *, instances: int = 1, seconds: float = SECONDS) -> Trace:
        """Return a trace at `load` times the capacity of full precision, with a profile that the seed chooses."""
        rng = np.random.default_rng(seed)
        profile = PROFILES[rng.integers(len(PROFILES))]
        rate = max(load * self.capacities[profile] * instances, 4 / seconds)
        return scaled(synthetic(profile, seconds, rate, rng), profile)

    def run(self, policy: str, traffic: Trace, *, instances: int = 1, **options: Any) -> Summary:
        """Simulate a policy under a traffic."""
        return summary(self.build(policy, instances, **options), traffic)

    def _capacity(self, profile: str) -> float:
        lengths = scaled(synthetic(profile, 1.0, AT_ONCE, np.random.default_rng(0)), profile)
        at_once = Trace.of(profile, np.zeros(len(lengths)), lengths.input_tokens, lengths.output_tokens)
        collected = simulate(self.build(), SimWorkload(at_once, {}), detailed=False)
        return len(at_once) / collected.last_answer_s


def world(seed: int, *, speed: str | None = None, short: str | None = None, platform: str | None = None) -> World:
    """Return the world of a seed, with the kinds that are given instead of drawn ones."""
    rng = np.random.default_rng(seed)
    # All kinds are drawn, so that one that is given leaves the others as they were.
    drawn = [str(rng.choice(kinds)) for kinds in (list(SPEEDS), SHORT, ("cpu", "gpu"))]
    speed, short, platform = speed or drawn[0], short or drawn[1], platform or drawn[2]
    longest = SHAPE.max_position // EngineConfig().page_size + 1
    return World(
        seed,
        speed,
        short,
        machine(rng, speed, platform),
        max_num_seqs=int(rng.integers(2, 7)) if short == "slots" else 32,
        kv_pages=int(rng.integers(longest + 4, 2 * longest)) if short == "pages" else 12 * longest,
    )


def machine(rng: np.random.Generator, speed: str, platform: str) -> Hardware:
    """Return hardware on which a step of a few rows takes 15 to 40 ms, and fewer bits are as fast as `speed` says.

    On a CPU the time grows with the rows from 4 to 12 on, on a GPU from 32 to 128 on.
    """
    knee = rng.uniform(4, 12) if platform == "cpu" else rng.uniform(32, 128)
    layer, step = SHAPE.layer_bytes(FULL), rng.uniform(0.015, 0.04)
    bandwidth = layer * SHAPE.num_layers / step
    rate = bandwidth / layer * knee * SHAPE.layer_ops()
    few, many = (float(rng.uniform(*factors)) for factors in SPEEDS[speed])
    # int8 lies between bfloat16 and int4, and int3 beyond.
    costs = {
        name: (few**power, many**power)
        for name, power in (("int8", rng.uniform(0.4, 0.9)), ("int4", 1.0), ("int3", 1.1))
    }
    curves = {name: curve(bandwidth, rate, name, *cost) for name, cost in costs.items()}
    defaults = PLATFORMS[platform]
    return Hardware(
        name=f"test-{platform}",
        source="drawn at random",
        measured=False,
        platform=platform,
        memory=256 << 30,
        bandwidth=bandwidth,
        rates=dict.fromkeys((FULL, *QUANTISED), rate),
        efficiency={FULL: Curve(((1, 1.0),)), "attention": Curve(((1, 1.0),)), **curves},
        devices_per_host=16,
        tile=defaults.tile,
        prefill_tokens=defaults.prefill_tokens,
        max_num_seqs=defaults.max_num_seqs,
        min_rows=defaults.min_rows,
        overheads=Overheads(step=float(rng.uniform(0, 2e-3)), host=1e-3, request=1e-3),
        links={"nvlink": Link(1e11, 1e-5)} | ({} if platform == "cpu" else {"pcie": Link(25e9, 1e-5)}),
    )


def curve(bandwidth: float, rate: float, precision: str, few: float, many: float) -> Curve:
    """Return the curve with which products take `few` to `many` times the time in bfloat16."""

    def roofline(name: str, rows: int) -> float:
        return max(SHAPE.layer_bytes(name) / bandwidth, rows * SHAPE.layer_ops() / rate)

    factors = np.exp(np.interp(np.log(ROWS), np.log([FEW, MANY]), np.log([few, many]))).tolist()
    return Curve(
        tuple(
            (rows, roofline(precision, rows) / (factor * roofline(FULL, rows)))
            for rows, factor in zip(ROWS, factors, strict=True)
        )
    )


def scaled(trace: Trace, profile: str) -> Trace:
    """Return a trace with lengths that the small model can have."""
    scale, longest = LENGTH_SCALES[profile], SHAPE.max_position // 2
    inputs, outputs = (
        np.clip(np.rint(tokens * scale), 1, longest - 1).astype(np.int64)
        for tokens in (trace.input_tokens, trace.output_tokens)
    )
    return Trace.of(profile, trace.arrival_s, inputs, outputs)


def summary(built: BuiltSimulation, traffic: Trace) -> Summary:
    """Run a simulation to its end."""
    collected = simulate(built, SimWorkload(traffic, {}), detailed=False)
    figures = collected.columns.summary(goodput={"ttft": SLO * 1e3}, percentiles=(95,))
    assert figures["completed"] == len(traffic), collected.columns.reasons
    control = built.control
    return Summary(
        figures["slo_violation_rate"],
        figures["p95_ttft_ms"] / 1e3,
        0 if control is None else len(control.decisions),
        control is None or control.settled_since is not None,
    )
