"""The one place where the parts of a simulation are wired together: from a `Cluster` to what can be run."""

from dataclasses import dataclass
from pathlib import Path

from jaxserve.core.clock import VirtualClock
from jaxserve.core.precision import assignment_id
from jaxserve.engine.core import EngineCore
from jaxserve.planning.spec import STATIC
from jaxserve.sim.cluster import Cluster
from jaxserve.sim.control import SETTLING, SimControl, build_control
from jaxserve.sim.instance import SimInstance
from jaxserve.sim.series import Sampler
from jaxserve.sim.simulation import Frontend, Simulation
from jaxserve.sim.step_time import StepTime
from jaxserve.telemetry import EngineMetrics


@dataclass(frozen=True)
class Built:
    """A simulation that is ready to run, and what looks on."""

    simulation: Simulation
    metrics: EngineMetrics
    control: SimControl | None  # None: nothing changes the plan
    sampler: Sampler


def build_simulation(cluster: Cluster, *, detailed: bool, interval: float, model_folder: Path | None = None) -> Built:
    """`detailed`: keep the times of all tokens. `interval`: virtual seconds between samples; 0: none.

    `model_folder` may have a profile of how sensitive the layers are. Raises `ConfigError`.
    """
    clock, metrics = VirtualClock(), EngineMetrics(cluster.info.name)
    timing = StepTime(cluster.shape, cluster.hardware, cluster.config.kv_cache_dtype)
    instances = [
        SimInstance(_core(cluster, number, metrics), plan, timing, cluster.memory.buckets, clock, detailed=detailed)
        for number, plan in enumerate(cluster.memory.plan.instances)
    ]
    control = None
    if cluster.config.policy != STATIC:
        control = build_control(cluster, instances, clock, model_folder)
    sampler = Sampler(instances, clock, interval, control)
    overheads = cluster.hardware.overheads
    simulation = Simulation(
        instances,
        clock,
        frontend=Frontend(overheads.request, overheads.prompt_token, overheads.stream),
        control=sampler if interval or control else None,
        linger=SETTLING if control else 0.0,
    )
    return Built(simulation, metrics, control, sampler)


def _core(cluster: Cluster, number: int, metrics: EngineMetrics) -> EngineCore:
    memory = cluster.memory
    instance = memory.plan.instances[number]
    scheduler, _ = memory.scheduler(instance)
    return EngineCore(
        scheduler,
        cluster.info,
        None,
        metrics,
        salt=assignment_id(instance.layer_precisions),
        plan_fields=memory.plan_fields(memory.plan, number),
        index=number,
    )
