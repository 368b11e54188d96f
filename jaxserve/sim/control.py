"""The real controller and its policy, ticking in virtual time over simulated instances."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jaxserve.calibration.sensitivity.order import sensitivity
from jaxserve.control.controller import Controller
from jaxserve.control.plan import PlanInForce
from jaxserve.control.policies import QualityLoss, load_policy
from jaxserve.control.reconfigure import PlanFacts
from jaxserve.control.record import Decision
from jaxserve.control.transitions import Outcome
from jaxserve.core.clock import Clock
from jaxserve.engine.step_log import LoggedActuator
from jaxserve.sim.actuator import Agenda, SimActuator
from jaxserve.sim.cluster import Cluster
from jaxserve.sim.hardware import Hardware, Link
from jaxserve.sim.instance import SimInstance
from jaxserve.sim.links import SharedLinks

SETTLING = 40.0  # s after the last answer in which layers may return to the plan at the start
PCIE = "pcie"


class SimControl:
    """A controller and its actuators as a source of events (`simulation.Control`).

    The controller ticks at its interval; the actuators advance when functions of the agenda are due.
    """

    def __init__(
        self,
        controller: Controller,
        agenda: Agenda,
        instances: Mapping[str, SimInstance],
        clock: Clock,
        actuators: Mapping[str, LoggedActuator],
    ):
        self.settled_since: float | None = clock.now()
        """The time (s) since which the plan at the start is in force and no transition runs; None if it is not so."""
        self._controller, self._agenda, self._actuators = controller, agenda, actuators
        self._instances, self._clock = instances, clock
        self._start = self._seen = controller.plan
        self._at_start_plan = True
        self._due = clock.now()

    def next_event(self) -> float:
        return min(self._due, self._agenda.next_event())

    def advance(self) -> None:
        now = self._clock.now()
        self._agenda.advance()
        if now >= self._due:
            self._due = now + self._controller.interval
            self._controller.tick(now, {name: instance.snapshot() for name, instance in self._instances.items()})
            self._track_settling(now)

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of all transitions that have ended, by instance."""
        return [outcome for actuator in self._actuators.values() for outcome in actuator.outcomes]

    @property
    def decisions(self) -> list[Decision]:
        """The controller's latest decisions, in order."""
        return list(self._controller.decisions)

    def _track_settling(self, now: float) -> None:
        plan = self._controller.plan
        if plan is not self._seen:
            self._seen, self._at_start_plan = plan, plan.instances == self._start.instances
        if self._controller.busy or not self._at_start_plan:
            self.settled_since = None
        elif self.settled_since is None:
            self.settled_since = now


def build_control(
    cluster: Cluster, instances: Sequence[SimInstance], clock: Clock, model_folder: Path | None
) -> SimControl:
    """Return a cluster's controller with the policy of its configuration.

    Raise `ConfigError` for an unknown policy or a sensitivity profile of another model. Each instance has its own link
    for weights, because every device of a stage has a link to its host.
    """
    memory, config, hardware = cluster.memory, cluster.config, cluster.hardware
    resources = replace(memory.resources(cluster.copy_rate), costs=cluster.costs)
    known = sensitivity(model_folder, cluster.shape.num_layers, memory.variants, None)
    policy = load_policy(
        config.policy,
        resources,
        known.swap_order,
        slo_ttft=config.slo_ttft,
        slo_tpot=config.slo_tpot,
        max_quality_loss=config.max_quality_loss,
        loss=None if known.layer_losses is None else QualityLoss(known.layer_losses),
    )
    in_force, agenda = PlanInForce(memory.plan), Agenda(clock)
    facts = PlanFacts(memory.plan_fields, cluster.costs)
    by_name = dict(zip((plan.name for plan in memory.plan.instances), instances, strict=True))
    actuators = {
        name: LoggedActuator(
            SimActuator(
                name,
                instance,
                in_force,
                clock,
                agenda,
                SharedLinks({PCIE: _weights_link(hardware)}),
                PCIE,
                ledgers=memory.ledgers,
                entries=memory.device_entries,
                facts=facts,
                compile_seconds=hardware.overheads.compile,
                batch_seconds=hardware.overheads.transition,
                warm=[("layers", precision) for precision in memory.variants] if config.warmup else (),
            )
        )
        for name, instance in by_name.items()
    }
    return SimControl(Controller(in_force, policy, resources, actuators), agenda, by_name, clock, actuators)


def _weights_link(hardware: Hardware) -> Link:
    """Return the link from the variants on the host to a device. On a CPU both are in the same memory."""
    return hardware.links.get("pcie") or Link(hardware.bandwidth, 0.0)
