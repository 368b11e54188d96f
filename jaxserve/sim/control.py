"""The real controller and its policy, ticking in virtual time over simulated instances."""

from collections.abc import Sequence
from pathlib import Path

from jaxserve.calibration.sensitivity.order import swap_order
from jaxserve.control.controller import Controller
from jaxserve.control.policies import load_policy
from jaxserve.control.record import Decision
from jaxserve.core.clock import Clock
from jaxserve.sim.actuator import SimActuator
from jaxserve.sim.cluster import Cluster
from jaxserve.sim.hardware import Hardware, Link
from jaxserve.sim.instance import SimInstance
from jaxserve.sim.links import SharedLinks

SETTLING = 40.0  # s after the last answer in which layers may return to the plan at the start


class SimControl:
    """A controller and its actuator as a source of events (`simulation.Control`).

    The controller ticks at its interval; the actuator advances when its next event is due.
    """

    def __init__(self, controller: Controller, actuator: SimActuator, instances: Sequence[SimInstance], clock: Clock):
        self.settled_since: float | None = clock.now()
        """The time (s) since which the plan at the start is in force and no transition runs; None if it is not so."""
        self._controller, self._actuator = controller, actuator
        self._instances, self._clock = instances, clock
        self._start = self._seen = controller.plan
        self._at_start_plan = True
        self._due = clock.now()

    def next_event(self) -> float:
        return min(self._due, self._actuator.next_event())

    def advance(self) -> None:
        now = self._clock.now()
        if self._actuator.next_event() <= now:
            self._actuator.advance(now)
        if now >= self._due:
            self._due = now + self._controller.interval
            self._controller.tick(now, [instance.snapshot() for instance in self._instances])
            self._track_settling(now)

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
    resources = memory.resources(cluster.copy_rate)
    order = swap_order(model_folder, cluster.shape.num_layers, memory.variants, None)
    policy = load_policy(config.policy, resources, order, slo_ttft=config.slo_ttft)
    names = [f"pcie-{index}" for index in range(len(instances))]
    actuator = SimActuator(
        memory.plan,
        instances,
        clock,
        SharedLinks(dict.fromkeys(names, _weights_link(hardware))),
        names,
        ledger=memory.ledger,
        entries=memory.ledger_entries,
        plan_fields=memory.plan_fields,
        compile_seconds=hardware.overheads.compile,
        warm=[("layers", precision) for precision in memory.variants] if config.warmup else (),
    )
    return SimControl(Controller(memory.plan, policy, resources, actuator), actuator, instances, clock)


def _weights_link(hardware: Hardware) -> Link:
    """Return the link from the variants on the host to a device. On a CPU both are in the same memory."""
    return hardware.links.get("pcie") or Link(hardware.bandwidth, 0.0)
