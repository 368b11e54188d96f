"""Construction of a simulation from all of its parts."""

from dataclasses import dataclass
from pathlib import Path

from jaxserve.core.clock import VirtualClock
from jaxserve.core.precision import assignment_id
from jaxserve.core.step_load import Loads
from jaxserve.engine.core import EngineCore
from jaxserve.planning.spec import STATIC
from jaxserve.sim.cluster import Cluster
from jaxserve.sim.control import SETTLING, SimControl, build_control
from jaxserve.sim.instance import SimInstance
from jaxserve.sim.sampler import SimSampler
from jaxserve.sim.simulation import Frontend, Simulation
from jaxserve.telemetry import EngineMetrics


@dataclass(frozen=True)
class BuiltSimulation:
    """A simulation that is ready to run, with its metrics, controller and sampler."""

    simulation: Simulation
    metrics: EngineMetrics
    control: SimControl | None  # None if the policy is static
    sampler: SimSampler


def build_simulation(
    cluster: Cluster, *, detailed: bool, interval: float, model_folder: Path | None = None
) -> BuiltSimulation:
    """Connect the parts of a simulation of `cluster`.

    With `detailed`, instances store the time of every token. `interval` is the virtual time (s) between two samples, 0
    for no samples. `model_folder` may contain a sensitivity profile of the layers. Raise `ConfigError` for
    an unknown policy, or a precision or link that the hardware lacks.
    """
    clock, metrics = VirtualClock(), EngineMetrics(cluster.info.name)
    cost_model = cluster.true_costs
    instances = [
        SimInstance(_core(cluster, index, metrics), plan, cost_model, cluster.memory.buckets, clock, detailed=detailed)
        for index, plan in enumerate(cluster.memory.plan.instances)
    ]
    control = None
    if cluster.config.policy != STATIC:
        control = build_control(cluster, instances, clock, model_folder)
    sampler = SimSampler(instances, clock, interval, control)
    overheads = cluster.hardware.overheads
    simulation = Simulation(
        instances,
        clock,
        frontend=Frontend(overheads.request, overheads.prompt_token, overheads.stream),
        control=sampler if interval or control else None,
        linger=SETTLING if control else 0.0,
    )
    return BuiltSimulation(simulation, metrics, control, sampler)


def _core(cluster: Cluster, index: int, metrics: EngineMetrics) -> EngineCore:
    memory = cluster.memory
    instance = memory.plan.instances[index]
    scheduler, _ = memory.scheduler(instance)
    return EngineCore(
        scheduler,
        cluster.info,
        None,
        metrics,
        salt=assignment_id(instance.layer_precisions),
        plan_fields=memory.plan_fields(instance, memory.plan.version),
        index=index,
        loads=Loads(memory.buckets),
        cost=cluster.costs.of(instance) if memory.variants else None,
    )
