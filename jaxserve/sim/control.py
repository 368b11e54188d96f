"""The real controller and its policy, ticking in virtual time over simulated instances."""

from dataclasses import dataclass, replace
from pathlib import Path

from jaxserve.calibration.sensitivity.order import sensitivity
from jaxserve.control.controller import Controller
from jaxserve.control.plan import InstancePlan, Plan, PlanInForce
from jaxserve.control.policies import DropSettings, MorphSettings, TransformSettings, load_policy
from jaxserve.control.policy import Policy
from jaxserve.control.reconfigure import PlanFacts
from jaxserve.control.record import Decision
from jaxserve.control.regrouping import Regrouping
from jaxserve.control.transitions import Outcome
from jaxserve.core.clock import Clock
from jaxserve.engine.logged_controller import LoggedActuator
from jaxserve.sim.actuator import SimActuator
from jaxserve.sim.cluster import Cluster
from jaxserve.sim.driver import Agenda
from jaxserve.sim.front import SimFront
from jaxserve.sim.hardware import Hardware, Link
from jaxserve.sim.host import Chunk, SimHost
from jaxserve.sim.instance import SimInstance
from jaxserve.sim.links import SharedLinks
from jaxserve.sim.maker import SimMaker
from jaxserve.sim.regroup import Pause, SimRegroupActuator

SETTLING = 40.0  # s after the last answer in which layers may return to the plan at the start
PCIE = "pcie"


@dataclass(frozen=True)
class InstancesSince:
    """The instances that there were from a time on."""

    time: float  # s
    instances: tuple[InstancePlan, ...]


class SimControl:
    """A controller and its actuators as a source of events (`simulation.Control`).

    The controller ticks at its interval; the actuators advance when functions of the agenda are due.
    """

    def __init__(
        self,
        controller: Controller,
        agenda: Agenda,
        front: SimFront,
        clock: Clock,
        host: SimHost,
        regrouper: SimRegroupActuator,
    ):
        self.settled_since: float | None = clock.now()
        """The time (s) since which the plan at the start is in force and no transition runs; None if it is not so."""
        self.sets = [InstancesSince(clock.now(), controller.plan.instances)]
        """The sets of instances that there were, in order."""
        self._controller, self._agenda, self._host, self._regrouper = controller, agenda, host, regrouper
        self._front, self._clock = front, clock
        self.max_kv_usage = 0.0
        """The largest share of an instance's KV pages in use that the policy has seen."""
        self.max_wait = 0.0
        """The longest time (s) that a waiting sequence had waited when the policy saw it."""
        self._note = ""  # the policy's last reason to change nothing, of one instance
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
            front = self._front
            snapshots = front.snapshots()
            for snapshot in snapshots.values():
                self.max_kv_usage = max(self.max_kv_usage, snapshot.kv_usage)
                self.max_wait = max(self.max_wait, snapshot.oldest_wait)
            self._controller.tick(now, snapshots, front.waiting_room(), front.longest)
            if not self._controller.decisions:
                self._note = next(iter(self._controller.notes.values()), self._note)
            self._track_settling(now)

    def follow(self) -> None:
        """Take note of the set of instances, which has changed."""
        plan = self._controller.plan
        if [instance.name for instance in plan.instances] != [i.name for i in self.sets[-1].instances]:
            self.sets.append(InstancesSince(self._clock.now(), plan.instances))

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of all transitions that have ended, by instance, and then those of regroups."""
        transitions = [outcome for actuator in self._host.all_actuators for outcome in actuator.outcomes]
        return transitions + self._regrouper.outcomes

    @property
    def pauses(self) -> list[Pause]:
        """The pauses of instances that were regrouped."""
        return self._regrouper.pauses

    @property
    def chunks(self) -> list[Chunk]:
        """The KV pages that instances have exchanged beside serving."""
        return self._host.chunks

    @property
    def decisions(self) -> list[Decision]:
        """The controller's latest decisions, in order."""
        return list(self._controller.decisions)

    @property
    def idle_reason(self) -> str | None:
        """The reason for which the policy never changed anything, or None if it did."""
        if self._controller.decisions:
            return None
        seen = f"KV use was at most {self.max_kv_usage:.0%}, and no request waited for more than {self.max_wait:.2f} s"
        policy = self._controller.policy
        settings = getattr(policy, "settings", None)
        if isinstance(settings, MorphSettings):
            seen += f" (it acts above {settings.kv_usage:.0%} or {settings.queue_delay:g} s)"
        elif isinstance(settings, DropSettings):
            seen += f" (it acts above {settings.drop_usage:.0%} or {settings.drop_wait:g} s)"
        elif isinstance(settings, TransformSettings):
            seen = "no request was longer than an instance holds"
        note = f"; what it last said: {self._note}" if self._note else ""
        return f"the policy {policy.name} changed nothing: {seen}{note}"

    def _track_settling(self, now: float) -> None:
        plan = self._controller.plan
        if plan is not self._seen:
            self._seen, self._at_start_plan = plan, _are_equal(plan, self._start)
        if self._controller.busy or not self._at_start_plan:
            self.settled_since = None
        elif self.settled_since is None:
            self.settled_since = now


def build_control(maker: SimMaker, front: SimFront, in_force: PlanInForce, policy: Policy, clock: Clock) -> SimControl:
    """Return the controller of a cluster's instances, with what carries out its plans.

    Each instance has its own link for weights, because every device of a stage has a link to its host.
    """
    cluster, memory, hardware = maker.cluster, maker.cluster.memory, maker.cluster.hardware
    agenda, facts, resources = Agenda(clock), PlanFacts(memory.plan_fields, cluster.costs), cluster.resources

    def new_actuator(instance: SimInstance) -> LoggedActuator:
        return LoggedActuator(
            SimActuator(
                instance.core.name,
                instance,
                instance.plan,
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
                warm=[("layers", precision) for precision in memory.variants] if cluster.config.warmup else (),
            )
        )

    host = SimHost(maker, front, resources, clock, new_actuator)
    regrouping = Regrouping(host, in_force, resources, memory.ledgers, memory.device_entries, facts, clock.now)
    regrouper = SimRegroupActuator(regrouping, host, front, clock, agenda, host_seconds=hardware.overheads.transition)
    controller = Controller(in_force, policy, resources, host.actuators, regrouper=regrouper)
    control = SimControl(controller, agenda, front, clock, host, regrouper)
    in_force.follow(control.follow)
    return control


def policy_of(cluster: Cluster, model_folder: Path | None) -> Policy:
    """Return the policy of a cluster's configuration.

    Raise `ConfigError` for an unknown policy or a sensitivity profile of another model.
    """
    config, memory = cluster.config, cluster.memory
    known = sensitivity(model_folder, cluster.shape.num_layers, memory.variants, None)
    return load_policy(
        config.policy,
        cluster.resources,
        known.swap_order,
        slo_ttft=config.slo_ttft,
        slo_tpot=config.slo_tpot,
        max_quality_loss=config.max_quality_loss,
        loss=known.loss,
    )


def _are_equal(plan: Plan, other: Plan) -> bool:
    """Return whether two plans have the same instances, whatever their names and their order."""
    if plan.instances == other.instances:
        return True
    if {instance.name for instance in plan.instances} == {instance.name for instance in other.instances}:
        return False
    nameless = ({replace(instance, name="") for instance in each.instances} for each in (plan, other))
    first, second = nameless
    return first == second


def _weights_link(hardware: Hardware) -> Link:
    """Return the link from the variants on the host to a device. On a CPU both are in the same memory."""
    return hardware.links.get("pcie") or Link(hardware.bandwidth, 0.0)
