"""The control of the set of instances: what a structural policy wants, carried out from alignment to finish.

    policy -> structural change -> align the instances that end -> regroup -> finish the new ones

A change waits for programs that are not compiled yet, and for requests that no instance could hold afterwards. While it
is carried out, instances that take part are held: their own control asks no policy about them. All others go on. If a
part fails, instances that were aligned and have not ended get their plans back.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from jaxserve.control.diff import diff
from jaxserve.control.instance_controller import Backoff, Failures, InstanceController
from jaxserve.control.plan import InstancePlan, Plan, PlanInForce
from jaxserve.control.policy import Policy, ServiceView, StructuralPolicy, errors_of_policy
from jaxserve.control.record import Decision
from jaxserve.control.recovery import lost_devices, recovery
from jaxserve.control.regroup import Regroup, StructuralChange, has_same_instances, structural_change
from jaxserve.control.resources import Resources, validate
from jaxserve.control.transitions import Outcome
from jaxserve.core.errors import PlanError, StageFailed

log = logging.getLogger(__name__)


class RegroupActuator(Protocol):
    """An actuator that carries out regroups while the other instances serve."""

    @property
    def busy(self) -> bool:
        """True while a regroup has not ended. Once it is False, `poll` returns all outcomes."""
        ...

    def start(self, regroups: Sequence[Regroup]) -> None:
        """Begin to carry out regroups in order, and return at once. Call it only when this actuator is not busy.

        After one that fails, the remaining ones are dropped.
        """
        ...

    def poll(self) -> Sequence[Outcome]:
        """Return the outcomes of regroups that have ended since the last call, in order."""
        ...

    def is_warm(self, plan: Any) -> bool:
        """Return whether all programs are compiled that an instance with this plan runs; if not, begin to do so."""
        ...

    @property
    def exchanging(self) -> frozenset[str]:
        """The names of instances whose KV pages are still on their way after a regroup."""
        ...

    @property
    def failed(self) -> Mapping[str, BaseException]:
        """The instances that have failed and keep their requests, by name, with their errors."""
        ...

    def give_up(self, name: str) -> None:
        """End the requests of an instance that has failed, with an error."""
        ...


class StructureController:
    """A controller of the set of instances. One thread calls `tick`."""

    def __init__(
        self,
        policy: Policy,
        start: Plan,
        resources: Resources,
        in_force: PlanInForce,
        actuator: RegroupActuator | None,
        backoff: Backoff,
        record: Callable[..., int],
        lock: threading.RLock,
    ):
        """Without `actuator` the set of instances never changes. The other arguments are as in `InstanceController`."""
        self._start, self._resources, self._in_force, self._actuator = start, resources, in_force, actuator
        self._backoff, self._record, self._lock = backoff, record, lock
        self._asked: object | None = None
        self._change: StructuralChange | None = None
        self._open: tuple[int, Decision] | None = None
        self._state_when_done: Any = None
        self._waiting_for: list[str] = []  # texts of the parts of the change that have not ended
        self._phase = _ALIGN
        self._restored: dict[str, InstancePlan] = {}  # plans of instances that were aligned, if the change fails
        self._failure = ""  # of the change, while these come into force again
        self._lost: set[int] = set()  # devices that have failed; policies do not get them back
        self._recovering = ""  # name of the failed instance in whose place the change puts others
        self._stopped = False
        self.target: Plan | None = None
        """The plan that is being carried out, or None."""
        self.set_policy(policy, self.first_state(policy))

    def first_state(self, policy: Policy) -> Any:
        """Return a policy's first state. Raise `ConfigError` if the policy raises."""
        if not isinstance(policy, StructuralPolicy):
            return None
        with errors_of_policy(f"policy {policy.name}: first_structure"):
            return policy.first_structure(self._start)

    def set_policy(self, policy: Policy, state: Any) -> None:
        """Let another policy decide from the next tick on, beginning with its first state.

        Devices that have failed are used again if it wants them: an operator has chosen it knowing that.
        """
        self._lost.clear()
        self._policy, self._asked = policy, None
        # Names of instances whose own plans the policy wants to stay; None: of all, until it is asked again.
        self._kept: frozenset[str] | None = frozenset()
        self._state = self._state_when_done = state
        self.note = ""
        self.failures = Failures()

    def stop(self) -> None:
        """Adopt no answer any more of a policy that has been asked, and recover no instance."""
        self._asked, self._stopped = None, True

    def check(self, plan: Plan) -> None:
        """Raise `PlanError` if the instances of a plan cannot take the place of those in force."""
        structural_change(self._in_force.plan, plan, self._resources)
        validate(plan, self._resources, self._in_force.plan.instances)
        if self._actuator is None:
            raise PlanError("the instances of this engine cannot change")

    def tick(self, now: float, view: ServiceView, instances: Mapping[str, InstanceController]) -> None:
        """Carry on with the change under way, or ask the policy if there is none."""
        if self._change is not None:
            with self._lock:
                self._carry_on(now, self._change, instances)
            return
        for name, instance in instances.items():
            instance.held = self.holds(name)
        if self._actuator is not None and (failed := self._failed(self._actuator)):
            with self._lock:
                self._recover(now, self._actuator, failed, instances)
        elif isinstance(self._policy, StructuralPolicy) and now >= self.failures.until:
            self._decide(now, self._policy, view, instances)

    def holds(self, name: str) -> bool:
        """Return whether the plan of an instance has to stay as it is for now."""
        kept = self._kept is None or name in self._kept
        return self.target is not None or kept or name in self.exchanging

    @property
    def exchanging(self) -> frozenset[str]:
        """The names of instances whose KV pages are on their way."""
        return frozenset() if self._actuator is None else self._actuator.exchanging

    @property
    def failed(self) -> frozenset[str]:
        """The names of instances that have failed and keep their requests."""
        return frozenset() if self._actuator is None else frozenset(self._actuator.failed)

    # -- instances that fail

    def _failed(self, actuator: RegroupActuator) -> dict[str, BaseException]:
        """Return the instances that have failed and can be recovered now: no KV page of theirs is on its way."""
        return {name: error for name, error in actuator.failed.items() if name not in actuator.exchanging}

    def can_recover(self, name: str) -> bool:
        """Return whether the requests of an instance that fails now can go on. Call from any thread."""
        if self._actuator is None or self._stopped:
            return False
        plan, failed = self._in_force.plan, self._actuator.failed
        serving = [instance for instance in plan.instances if instance.name not in failed and instance.name != name]
        return bool(serving) or any(instance.name == name and instance.lanes > 1 for instance in plan.instances)

    def _recover(
        self,
        now: float,
        actuator: RegroupActuator,
        failed: Mapping[str, BaseException],
        instances: Mapping[str, InstanceController],
    ) -> None:
        """Begin to put others in the place of one of the instances that have failed."""
        plan = self._in_force.plan
        # Groups come first: those that they become may take the requests of others.
        name = min(failed, key=lambda name: plan.instance(name).lanes == 1)
        error = failed[name]
        shown = str(error) if isinstance(error, StageFailed) else f"{type(error).__name__}: {error}"
        reason = f"instance {name} has failed: {shown}"
        try:
            regroup = recovery(plan, name, failed[name], self._start, self._resources, self._in_force.used_names)
        except PlanError as impossible:
            self._record(self._decision(now, reason, f"rejected: {impossible}"))
            actuator.give_up(name)
            return
        kept = [instance for instance in plan.instances if instance.name != name]
        wanted = Plan(plan.version + 1, (*kept, *regroup.after))
        self._recovering = name
        self._lost |= lost_devices(plan.instance(name), failed[name])
        self._begin(now, reason, wanted, StructuralChange({}, (regroup,), {}), self._state, instances)

    # -- decisions

    def _decide(self, now: float, policy: Any, view: ServiceView, instances: Mapping[str, InstanceController]) -> None:
        """Ask the policy, and begin the change that it wants. Errors are treated as in `InstanceController`.

        A change that has to wait does not begin: the policy is asked again at the next tick, and may want something
        else by then.
        """
        plan = self._in_force.plan
        self._asked = asked = object()
        reason, error, change, wanted = "the policy failed", "", None, plan
        waits, kept = "", frozenset[str]()
        try:
            proposal = policy.restructure(view, plan, self._state)
            reason, wanted, state = proposal.reason, proposal.plan, proposal.state
            kept = frozenset(proposal.keeps)
            if wanted.instances != plan.instances and not (waits := self._waits_for_devices(wanted)):
                change = structural_change(plan, wanted, self._resources)
                if not has_same_instances(plan, wanted):
                    self.check(wanted)
                    waits = self._waits_for(view, wanted, change)
        except PlanError as refused:
            error = str(refused)
        except Exception as failure:
            log.exception("policy %s failed; the instances stay as they are", policy.name)
            error = f"{type(failure).__name__}: {failure}"
        with self._lock:
            if asked is not self._asked:
                return
            if error:
                self._record(self._decision(now, reason, f"rejected: {error}"))
                self._fail(now)
            elif waits:
                self.note = f"{reason}: waits for {waits}"
            elif change is None or not (change.regroups or change.finish):
                self._state, self.note = state, reason
            else:
                self._begin(now, reason, wanted, change, state, instances)
                return
            self._kept = kept

    def _waits_for_devices(self, plan: Plan) -> str:
        """Return which devices of a plan have failed; "" if none has."""
        lost = sorted(self._lost & {device for instance in plan.instances for device in instance.devices})
        return f"device {', '.join(map(str, lost))}, which failed (set another plan or policy)" if lost else ""

    def _waits_for(self, view: ServiceView, plan: Plan, change: StructuralChange) -> str:
        """Return what has to come before the instances of a plan can begin; "" for nothing."""
        assert self._actuator is not None
        present, wanted = self._in_force.plan.instances, plan.instances
        ending = [old for old in present if not any(_is_same(old, new) for new in wanted)]
        longest = max((view.longest(instance.name) for instance in ending), default=0)
        if longest > max(self._resources.limits_of(instance.tp).max_len for instance in wanted):
            return f"the end of a request of {longest} tokens, which no instance could hold"
        if moving := sorted(old.name for old in ending if old.name in self.exchanging):
            return f"KV pages of instance {', '.join(moving)}, which are on their way"
        beginning = [new for new in wanted if not any(_is_same(old, new) for old in present)]
        moves_pages = any(not regroup.after for regroup in change.regroups)  # between instances that were there before
        # All are asked about, so that the programs of all are compiled.
        cold = [
            instance
            for instance in (*beginning, *(present if moves_pages else ()))
            if not self._actuator.is_warm(instance)
        ]
        devices = sorted({device for instance in cold for device in instance.devices})
        names = ", ".join(map(str, devices))
        return f"the programs of device{'s' if len(devices) > 1 else ''} {names}" if devices else ""

    def _begin(
        self,
        now: float,
        reason: str,
        wanted: Plan,
        change: StructuralChange,
        state: Any,
        instances: Mapping[str, InstanceController],
    ) -> None:
        self.target, self.note, self._change, self._phase = wanted, "", change, _ALIGN
        self._state_when_done = state
        plan = self._in_force.plan
        self._restored = {name: plan.instance(name) for name in change.align}
        aligning = [
            transition
            for name, aligned in change.align.items()
            for transition in diff(plan.instance(name), aligned, self._resources)
        ]
        decision = self._decision(now, reason, "started", tuple(map(str, (*aligning, *change.regroups))))
        self._open = self._record(decision), decision
        for name in _taking_part(change):
            if name in instances:
                instances[name].held = True
        self._carry_on(now, change, instances)

    # -- the change under way

    def _carry_on(self, now: float, change: StructuralChange, instances: Mapping[str, InstanceController]) -> None:
        """Begin the next phase of a change if the present one has ended."""
        if self._phase is _ALIGN and self._all_have(now, change.align, instances, _members(change)):
            self._phase = _REGROUP
            if change.regroups:
                assert self._actuator is not None
                self._actuator.start(change.regroups)
        if self._phase is _REGROUP and self._regrouped(now, change):
            self._phase = _FINISH
        if self._phase is _FINISH and self._all_have(now, change.finish, instances, change.finish):
            self._end(now, "done")
        if self._phase is _RESTORE and self._change is not None:
            there = {instance.name: instance for instance in self._in_force.plan.instances}
            plans = {
                name: plan for name, plan in self._restored.items() if name in there and plan.same_place(there[name])
            }
            if self._all_have(now, plans, instances, plans):
                self._end(now, self._failure)
        if self._change is None:
            for name, instance in instances.items():
                instance.held = self.holds(name)

    def _all_have(
        self,
        now: float,
        plans: Mapping[str, Any],
        instances: Mapping[str, InstanceController],
        names: Any,
    ) -> bool:
        """Return whether the instances with these names are settled under their plans; begin what is missing."""
        settled = True
        for name in names:
            instance = instances.get(name)
            if instance is None:
                settled = False  # it is followed from the next tick on
                continue
            instance.held = True
            if not instance.settled or name in self.exchanging:
                settled = False
            elif instance.error and name == self._recovering:
                instance.error = ""  # of a transition that came to nothing because the instance has failed
            elif instance.error:
                error, instance.error = instance.error, ""
                self._fail_change(now, error)
                return False
            elif name in plans and self._in_force.instance(name) != plans[name]:
                settled = False
                try:
                    instance.carry_out(plans[name])
                except PlanError as error:
                    self._fail_change(now, f"failed: {error}")
                    return False
        return settled

    def _regrouped(self, now: float, change: StructuralChange) -> bool:
        if not change.regroups:
            return True
        assert self._actuator is not None
        busy = self._actuator.busy
        for outcome in self._actuator.poll():
            if outcome.error is not None:
                self._fail_change(now, f"failed: {outcome.transition}: {outcome.error}")
                return False
        return not busy

    def _fail_change(self, now: float, outcome: str) -> None:
        """End the change that has failed, after the instances that were aligned have their plans back."""
        if self._phase is _RESTORE:
            self._end(now, self._failure)  # they have not got them: the policy goes on from what there is
        else:
            self._phase, self._failure = _RESTORE, outcome

    def _end(self, now: float, outcome: str) -> None:
        assert self._open is not None
        number, decision = self._open
        self._record(replace(decision, outcome=outcome), number)
        if self._recovering and outcome != "done" and self._actuator is not None:
            self._actuator.give_up(self._recovering)
        self._recovering = ""
        self.target, self._change, self._open = None, None, None
        if outcome == "done":
            self._state = self._state_when_done
            self.failures = Failures()
            self._kept = None if isinstance(self._policy, StructuralPolicy) else frozenset()
        else:
            self._fail(now)

    def _fail(self, now: float) -> None:
        count = self.failures.count + 1
        self.failures = Failures(count, now + self._backoff.delay(count))

    def _decision(self, now: float, reason: str, outcome: str, transitions: tuple[str, ...] = ()) -> Decision:
        version = self._in_force.version
        return Decision(now, self._policy.name, reason, version, version + len(transitions), transitions, outcome)


_ALIGN, _REGROUP, _FINISH, _RESTORE = "align", "regroup", "finish", "restore"


def _is_same(old: InstancePlan, new: InstancePlan) -> bool:
    return old.name == new.name and old.same_place(new)


def _members(change: StructuralChange) -> list[str]:
    """Return the names of the instances that end."""
    return [name for regroup in change.regroups for name in regroup.before]


def _taking_part(change: StructuralChange) -> list[str]:
    return [*_members(change), *change.finish]
