"""Construction of a simulation from all of its parts."""

from dataclasses import dataclass
from pathlib import Path

from jaxserve.control.plan import PlanInForce
from jaxserve.control.policy import StructuralPolicy
from jaxserve.control.service_limits import ServiceLimits
from jaxserve.core.clock import VirtualClock
from jaxserve.planning.spec import STATIC
from jaxserve.sim.cluster import Cluster
from jaxserve.sim.control import SETTLING, SimControl, build_control, policy_of
from jaxserve.sim.front import SimFront
from jaxserve.sim.maker import SimMaker
from jaxserve.sim.pipeline import Pipeline
from jaxserve.sim.sampler import SimSampler
from jaxserve.sim.simulation import Frontend, Simulation
from jaxserve.telemetry import EngineMetrics


@dataclass(frozen=True)
class BuiltSimulation:
    """A simulation that is ready to run, with its metrics, controller and sampler, and the instances' pipelines."""

    simulation: Simulation
    metrics: EngineMetrics
    control: SimControl | None  # None if the policy is static
    sampler: SimSampler
    pipelines: list[Pipeline]  # grows with the instances that are made


def build_simulation(
    cluster: Cluster, *, detailed: bool, interval: float, model_folder: Path | None = None
) -> BuiltSimulation:
    """Connect the parts of a simulation of `cluster`.

    With `detailed`, instances store the time of every token. `interval` is the virtual time (s) between two samples, 0
    for no samples. `model_folder` may contain a sensitivity profile of the layers. Raise `ConfigError` for
    an unknown policy, or a precision or link that the hardware lacks.
    """
    clock, metrics = VirtualClock(), EngineMetrics(cluster.info.name)
    token_times: dict[str, list[float]] | None = {} if detailed else None
    maker = SimMaker(cluster, metrics, clock, token_times)
    instances = [maker.make(plan) for plan in cluster.memory.plan.instances]
    in_force, control = PlanInForce(cluster.memory.plan), None
    policy = None if cluster.config.policy == STATIC else policy_of(cluster, model_folder)
    structural: object = policy
    unequal = cluster.memory.plan.largest_tp > cluster.config.tp
    if unequal or isinstance(structural, StructuralPolicy):
        limits = ServiceLimits(in_force, cluster.resources, lambda: policy)
        front = SimFront(instances, cluster.info, clock, route=limits.route, max_model_len=limits.max_model_len)
        in_force.follow(front.reroute)
    else:
        front = SimFront(instances, cluster.info, clock)
    if policy is not None:
        control = build_control(maker, front, in_force, policy, clock)
    sampler = SimSampler(front, clock, interval, control)
    overheads = cluster.hardware.overheads
    simulation = Simulation(
        front,
        clock,
        frontend=Frontend(overheads.request, overheads.prompt_token, overheads.stream),
        control=sampler if interval or control else None,
        linger=SETTLING if control else 0.0,
        token_times=token_times,
    )
    return BuiltSimulation(simulation, metrics, control, sampler, maker.pipelines)
