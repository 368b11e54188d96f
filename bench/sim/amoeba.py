"""What the experiments after the AMOEBA paper have in common: Qwen2.5-32B on eight H20, its traces and its SLO.

The paper gives 62.34 GB of weights, 14.3 GB of runtime activations and 96 GB of memory. With 90 % of the memory, 9.8 GB
remain for KV: `PAPER_GB` leaves as much here, where the weights take 65.5 GB, and workspace and exchange 3.9 GB. The
longest context in the paper's table, 3.75K at degree 1, is 1 GB of KV: `TIGHT_GB`.

`paper_links` are links that are slow enough for the loss of throughput in the paper's table 1, which NVLink with its
bandwidth and the latency that was fitted to an H100 does not have.
"""

import argparse
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from jaxserve.control.degree_limits import DegreeLimits
from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.regroup import merged_plan
from jaxserve.core.config import EngineConfig
from jaxserve.core.numeric import ceil_div
from jaxserve.sim.build import BuiltSimulation, build_simulation
from jaxserve.sim.cluster import Cluster, resolve_cluster
from jaxserve.sim.hardware import Hardware, Link, load_hardware
from jaxserve.sim.shape import ModelShape
from jaxserve.sim.simulation import Answered, SimRequest

PAPER_GB, TIGHT_GB = 79.3, 70.55
SLO_TTFT, SLO_TPOT = 10.0, 0.1  # s, of the paper
PAPER_TABLE = {1: ("3.75K", 448), 2: ("41.25K", 670), 4: ("120.5K", 767)}  # longest context, tokens/s of an instance
PAPER_LENGTHS = {1: 3_840, 2: 42_240, 4: 123_392}  # tokens


@cache
def hardware(links: str = "nvlink") -> Hardware:
    """Return the H20, with NVLink or with the links of the paper's table 1 ("paper")."""
    h20 = load_hardware("h20")
    return h20 if links == "nvlink" else replace(h20, links={**h20.links, "nvlink": PAPER_LINK})


PAPER_LINK = Link(bandwidth=1.1e10, latency=2.8e-05)


def cluster(
    policy: str = "static", *, devices: int = 8, memory_gb: float = PAPER_GB, links: str = "nvlink", max_tp: int = 4
) -> Cluster:
    """Return instances of one device each, which may be merged up to `max_tp`."""
    config = EngineConfig(
        dp=devices,
        max_tp=max_tp,
        memory_gb=memory_gb,
        policy=policy,
        prefix_caching=False,
        max_queued_requests=10**6,
        max_queued_tokens=10**10,
    )
    with _expected_warnings():
        made = resolve_cluster(config, ModelShape.load("qwen2.5-32b"), hardware(links))
    return made if links == "nvlink" or max_tp == 1 else _with_paper_lengths(made)


@contextmanager
def _expected_warnings() -> Iterator[None]:
    """Silence the warnings that memory limits the longest context."""
    logger = logging.getLogger("jaxserve.planning.kv_pages")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _with_paper_lengths(cluster: Cluster) -> Cluster:
    """Return a cluster whose instances promise no longer contexts than those in the paper's table 1."""
    page_size, memory = cluster.config.page_size, cluster.memory

    def limited(limits: DegreeLimits) -> DegreeLimits:
        length = min(limits.max_len, PAPER_LENGTHS[limits.tp])
        return replace(limits, max_len=length, min_pages=ceil_div(length, page_size) + 1)

    degrees = tuple(map(limited, memory.limits.degrees))
    first = degrees[0]
    limits = replace(memory.limits, degrees=degrees, max_len=first.max_len, min_pages=first.min_pages)
    info = replace(cluster.info, max_model_len=first.max_len)
    return replace(cluster, memory=replace(memory, limits=limits, max_model_len=first.max_len), info=info)


def with_degrees(cluster: Cluster, degrees: Sequence[int]) -> Cluster:
    """Return a cluster whose devices are shared by instances of these degrees, which do not change."""
    members, instances = iter(cluster.memory.plan.instances), []
    for number, degree in enumerate(degrees):
        own = [next(members) for _ in range(degree)]
        plan = own[0] if degree == 1 else _merged(cluster, own)
        instances.append(replace(plan, name=str(number)))
    return replace(cluster, memory=replace(cluster.memory, plan=Plan(1, tuple(instances))))


def _merged(cluster: Cluster, members: Sequence[InstancePlan]) -> InstancePlan:
    plan = merged_plan(members, "")
    return plan.with_kv_pages(cluster.memory.limits.kv_capacity(plan))


def built(cluster: Cluster) -> BuiltSimulation:
    """Return a simulation of a cluster."""
    return build_simulation(cluster, detailed=False, interval=0.0)


def served(built: BuiltSimulation, requests: Iterable[SimRequest]) -> list[Answered]:
    """Simulate requests, and return their results."""
    asked = sorted(requests, key=lambda request: request.arrival)
    answers = []
    for answer in built.simulation.run(asked):
        answers.append(answer)
        if len(answers) == len(asked):
            built.sampler.finish()
    return answers


def poisson(rate: float, seconds: float, inputs: int, outputs: int, rng: np.random.Generator) -> list[SimRequest]:
    """Return requests of equal lengths with random arrivals."""
    times = np.cumsum(rng.exponential(1 / rate, int(rate * seconds * 1.5) + 20))
    return [SimRequest(float(time), inputs, outputs) for time in times if time < seconds]


@dataclass(frozen=True)
class Figures:
    """Figures of a run."""

    throughput: float  # output tokens/s from the first arrival to the last answer
    goodput: float  # the same, of the requests within the SLO alone
    within_slo: float  # share of the requests
    refused: int
    p95_ttft: float
    p95_tpot: float

    @classmethod
    def of(cls, answers: Sequence[Answered], slo_ttft: float = SLO_TTFT, slo_tpot: float = SLO_TPOT) -> "Figures":
        """Return the figures of results. A refused request is outside the SLO."""
        done = [answer for answer in answers if answer.error is None]
        ttft = np.array([answer.first_token - answer.request.arrival for answer in done])
        gaps = np.array([max(answer.output_tokens - 1, 1) for answer in done])
        tpot = np.array([answer.last_token - answer.first_token for answer in done]) / gaps
        tokens = np.array([answer.output_tokens for answer in done])
        begin = min(answer.request.arrival for answer in answers)
        seconds = max(answer.last_token for answer in done) - begin
        good = (ttft <= slo_ttft) & (tpot <= slo_tpot)
        return cls(
            float(tokens.sum() / seconds),
            float(tokens[good].sum() / seconds),
            float(good.sum() / len(answers)),
            len(answers) - len(done),
            float(np.percentile(ttft, 95)),
            float(np.percentile(tpot, 95)),
        )


def options_of(doc: str | None) -> argparse.Namespace:
    """Return the options of a script that has no others."""
    return parser_of(doc).parse_args()


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="shorter traces: shows that the script works")
    made.add_argument("--out", type=Path, default=Path("bench/out/sim"), help="folder for the table")
    return made


def report(options: argparse.Namespace, name: str, text: str) -> None:
    """Print a text, and write it to NAME.md in the folder of the options."""
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)
