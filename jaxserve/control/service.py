"""The control plane, which runs an engine's controller in a thread and serves operators' requests about the plan."""

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import lru_cache, partial
from typing import Any

from jaxserve.control.controller import Controller
from jaxserve.control.kv_headroom import KVHeadroom
from jaxserve.control.ledger import DeviceLedgers
from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.plan_edits import INTO, PlanEdit
from jaxserve.control.plan_yaml import from_yaml, to_dict, to_yaml
from jaxserve.control.policies.quality import FLOOR, QualityLoss
from jaxserve.control.policy import Policy
from jaxserve.control.resources import Resources
from jaxserve.core.block_names import is_layer
from jaxserve.core.clock import Clock
from jaxserve.core.errors import ConfigError, PlanError, RequestError
from jaxserve.telemetry import ControlState, Quality, Snapshot, WaitingRoom, combine

log = logging.getLogger(__name__)

PATIENCE = 1.0  # s that a policy may take to answer until nobody waits for it any more
MAX_SHOWN_INSTANCES = 16  # whose layers the status lists


class ControlPlane:
    """A control plane, which implements `engine.client.ControlClient`. Its methods may be called from any thread."""

    def __init__(
        self,
        controller: Controller,
        resources: Resources,
        ledgers: DeviceLedgers,
        clock: Clock,
        *,
        snapshots: Callable[[], Mapping[str, Snapshot]],
        waiting: Callable[[], WaitingRoom] = WaitingRoom,
        longest: Callable[[str], int] = lambda name: 0,
        policy_names: Iterable[str],
        load_policy: Callable[..., Policy],
        started_with: str,
        loss: QualityLoss | None = None,
    ):
        """`snapshots()` returns the latest snapshot of each instance by its name.

        `waiting()` returns the state of the requests that no instance can hold, and `longest` is as in `ServiceView`.

        `load_policy(name)` returns a policy of `policy_names`. It takes `settings`, and a plan as `target` for
        "manual". `started_with` is the name or the file of the controller's present policy. That policy can be set
        again by the same text, so that no request over HTTP makes the engine read or run a file. `loss` is what fewer
        bits cost.
        """
        self._loss = loss
        self._controller, self._resources, self._ledgers, self._clock = controller, resources, ledgers, clock
        self._snapshots, self._waiting, self._longest = snapshots, waiting, longest
        self._max_pages = lru_cache(maxsize=8)(partial(_max_pages, resources))
        self._headroom = KVHeadroom(resources, controller.plan)
        self._built_in = tuple(policy_names)
        self._policy_names = tuple(dict.fromkeys((*self._built_in, started_with)))
        self._load_policy, self._first = load_policy, (started_with, controller.policy)
        self._policy_name = started_with  # as it was given
        self._lock = threading.Lock()
        self._closed = False
        self._ticker = self._new_ticker()

    def close(self) -> None:
        """End the thread. The caller closes the actuator. May be called several times.

        A policy that does not answer is left behind in its thread, and its answer changes nothing.
        """
        with self._lock:
            self._closed = True
            if not self._ticker.stop():
                self._controller.stop()
                log.warning("the policy %s does not answer; the control plane ends without it", self._policy_name)

    def _new_ticker(self) -> "_Ticker":
        def tick() -> None:
            self._controller.tick(self._clock.now(), self._snapshots(), self._waiting(), self._longest)

        return _Ticker(tick, self._controller.interval, self._clock)

    @property
    def loss(self) -> QualityLoss | None:
        """The loss that fewer bits are expected to cause; None if nothing is known."""
        return self._loss

    @property
    def policy(self) -> Policy:
        """The policy that decides."""
        return self._controller.policy

    def can_recover(self, name: str) -> bool:
        """Return whether the requests of an instance that fails now can go on."""
        return not self._closed and self._controller.can_recover(name)

    def renew(self, load_policy: Callable[..., Policy], loss: QualityLoss) -> None:
        """Go on with what has been measured meanwhile: `load_policy` and `loss` as at the start.

        A policy that an operator has given other settings keeps deciding as before.
        """
        name, before = self._first
        policy = load_policy(name) if name != "manual" else before
        self._load_policy, self._loss, self._first = load_policy, loss, (name, policy)
        if self._controller.policy is before and policy is not before:
            self._change(policy, name, name, why="layers were measured: ")

    # -- what operators see

    def plan_yaml(self) -> str:
        return to_yaml(self._controller.plan)

    def plan_dict(self) -> dict[str, Any]:
        return to_dict(self._controller.plan)

    def status(self) -> dict[str, Any]:
        controller, snapshots, room = self._controller, self._snapshots(), self._waiting()
        snapshot = combine(list(snapshots.values()))
        plan, target, fullest = controller.plan, controller.target, self._ledgers.fullest
        shown = _shown(plan)
        layers = [[asdict(b) for b in i.blocks if is_layer(b.block)] for i in shown]
        precisions = Counter(precision for i in plan.instances for precision in i.layer_precisions)
        pages = sum(instance.kv_pages - 1 for instance in plan.instances)
        states = dict.fromkeys(controller.exchanging, "exchanging") | dict.fromkeys(controller.failed, "failed")
        return {
            "time": self._clock.now(),
            "policy": controller.policy.name,
            "policies": list(self._policy_names),
            "plan_version": plan.version,
            "target_version": None if target is None else target.version,
            "busy": controller.busy,
            "note": self._note(),
            "budget": fullest.budget,
            "ledger": dict(fullest.entries),
            "devices": [{"device": device, "used": ledger.used} for device, ledger in self._ledgers.items()],
            "num_instances": len(plan.instances),
            "instances": [instance.name for instance in shown],
            "instance_states": [
                _state(instance, snapshots.get(instance.name, Snapshot()), states.get(instance.name))
                for instance in shown
            ],
            "waiting_room": {
                "requests": room.count,
                "tokens": room.tokens,
                "longest_tokens": room.longest,
                "oldest_seconds": room.oldest_wait,
            },
            "layers": layers,
            "precisions": dict(precisions),
            "kv_pages": {
                "used": snapshot.kv_pages_used,
                "total": pages,
                "most": self._max_pages(tuple(instance.with_kv_pages(1) for instance in plan.instances)),
            },
            "snapshot": _plain(snapshot),
            "quality": asdict(self._quality(plan)),
            **_objectives(controller.policy),
        }

    def policy_in_force(self) -> dict[str, Any]:
        policy = self._controller.policy
        settings = getattr(policy, "settings", None)
        known = asdict(settings) if is_dataclass(settings) and not isinstance(settings, type) else {}
        return {
            "policy": policy.name,
            "source": self._policy_name,
            "settings": {name: None if value == math.inf else value for name, value in known.items()},
            "objectives": _objectives(policy),
        }

    def state(self) -> ControlState:
        controller = self._controller
        plan = controller.plan
        return ControlState(self._headroom.of(controller.policy, plan), controller.ended, self._quality(plan))

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        return [asdict(decision) for decision in self._controller.latest_decisions(limit)]

    def history(self, since: float = float("-inf")) -> list[dict[str, Any]]:
        samples = self._controller.samples_since(since)
        entries = [entry for ledger in self._ledgers.values() for entry in ledger.entries.items()]
        fixed = sum(size for name, size in entries if name not in ("weights", "variants", "kv"))
        budget = sum(ledger.budget for ledger in self._ledgers.values())
        shown = [asdict(sample) for sample in samples]
        for sample in shown:
            sample["other_bytes"] = fixed + sample.pop("variant_bytes")
            sample["budget"] = budget
        return shown

    # -- what operators change

    def set_policy(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        shown = name[:100]
        if name not in self._policy_names:
            names = ", ".join(self._policy_names)
            raise RequestError(f"unknown policy {shown!r}: choose from {names}", field="policy", value=shown)
        if settings is not None and name not in self._built_in:
            names = ", ".join(self._built_in)
            raise RequestError(f"{shown!r} takes no settings: choose from {names}", field="settings")
        first_name, first = self._first
        if settings is None and name == first_name:
            self._change(first, name, name)
            return
        try:
            policy = self._load_policy(name, settings=settings)
        except ConfigError as error:  # e.g. a setting that is out of range, or no variants to change to
            fault = ("policy", shown) if settings is None else ("settings", None)
            raise RequestError(str(error), field=fault[0], value=fault[1]) from error
        given = ", ".join(f"{key} {'none' if value is None else value}" for key, value in (settings or {}).items())
        self._change(policy, name, f"{name} with {given}" if given else name)

    def set_plan(self, yaml_text: str) -> None:
        try:
            plan = from_yaml(yaml_text)
        except ConfigError as error:
            raise RequestError(str(error), field="plan") from error
        self._set_plan(plan, "a plan")

    def edit_plan(
        self,
        action: str,
        instances: Sequence[str] = (),
        *,
        into: int | None = None,
        devices: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        if self._controller.regrouping:
            raise PlanError("the set of instances is changing: try again when that is done")
        chosen = None if devices is None else tuple(devices)
        edit = PlanEdit(action, tuple(instances), INTO if into is None else into, chosen)
        plan = self._controller.edited(edit)
        self._set_plan(plan, str(edit))
        return to_dict(plan)

    def _set_plan(self, plan: Plan, described: str) -> None:
        price = self._price(plan)
        self._change(self._load_policy("manual", target=plan), "manual", "manual", plan, f"{described}{price}, ")

    def _price(self, plan: Plan) -> str:
        """Return in words what a plan of an operator costs if it is more than policies accept; otherwise ""."""
        floor = getattr(self._first[1], "max_quality_loss", None) or FLOOR
        loss = self._quality(plan).loss
        if loss <= floor:
            return ""
        text = f" that is expected to lose {loss:.1%}, more than the floor of {floor:.0%}".replace("%", " %")
        log.warning("an operator sets a plan%s of the cross-entropy (max_quality_loss)", text)
        return text

    def _quality(self, plan: Plan) -> Quality:
        """Return what a plan costs in the instance that loses most."""
        floor = getattr(self._controller.policy, "max_quality_loss", None)
        if self._loss is None:
            return Quality(floor=floor)
        loss = self._loss
        layers = max((instance.layer_precisions for instance in plan.instances), key=loss)
        return Quality(loss(layers), loss.nats(layers), floor, loss.is_measured(layers))

    def _change(
        self,
        policy: Policy,
        name: str,
        described: str,
        plan: Plan | None = None,
        plan_described: str = "",
        why: str | None = None,
    ) -> None:
        """Set another policy, or a plan with the policy that keeps it, and record it.

        Each policy has a thread of its own, so that one that never answers does not keep the next one from being asked.
        """
        with self._lock:
            if self._closed:
                return
            if plan is not None:
                self._controller.check(plan)
            change = f"{plan_described}policy {self._policy_name} -> {described}"
            try:
                self._controller.change_policy(self._clock.now(), policy, change, *(() if why is None else (why,)))
            except ConfigError as error:
                raise RequestError(str(error), field="policy") from error
            if not self._ticker.stop():
                log.warning("the policy %s does not answer; it is left behind", self._policy_name)
            self._policy_name = name
            self._ticker = self._new_ticker()

    def _note(self) -> str:
        """Return what the policy waits for, or for how long it has not answered."""
        if (seconds := self._ticker.seconds) > PATIENCE:
            return f"the policy {self._policy_name} has not answered for {seconds:.0f} s"
        return self._controller.note


class _Ticker(threading.Thread):
    """A thread that calls a function at an interval until it is stopped."""

    def __init__(self, tick: Callable[[], None], interval: float, clock: Clock):
        super().__init__(name="jaxserve-control", daemon=True)
        self._tick, self._interval, self._clock = tick, interval, clock
        self._stopping = threading.Event()
        self._began: float | None = None  # of the call under way
        self.start()

    @property
    def seconds(self) -> float:
        """The seconds that the call under way has taken; 0 if there is none."""
        began = self._began
        return 0.0 if began is None else self._clock.now() - began

    def stop(self) -> bool:
        """Let no further call begin, and return whether the last one has ended within `PATIENCE`."""
        self._stopping.set()
        self.join(PATIENCE)
        return not self.is_alive()

    def run(self) -> None:
        while not self._stopping.wait(self._interval):
            self._began = self._clock.now()
            try:
                self._tick()
            except Exception:
                log.exception("the control plane failed; the plan in force stays")
            self._began = None


def _max_pages(resources: Resources, instances: Sequence[InstancePlan]) -> int:
    """Return the KV pages that instances have at most, without their null pages."""
    return sum(resources.max_capacity(instance) - 1 for instance in instances)


def _objectives(policy: Policy) -> dict[str, float | None]:
    """Return the objectives of a policy by name; None for one that it does not have."""
    return {name: getattr(policy, name, None) for name in ("slo_ttft", "slo_tpot", "max_quality_loss")}


def _shown(plan: Plan) -> Sequence[InstancePlan]:
    """Return the instances whose layers are shown, in order: if not all, then rather those that differ from most."""
    if len(plan.instances) <= MAX_SHOWN_INSTANCES:
        return plan.instances
    ((usual, _),) = Counter(instance.layer_precisions for instance in plan.instances).most_common(1)
    by_difference = sorted(enumerate(plan.instances), key=lambda each: each[1].layer_precisions == usual)
    return [instance for _, instance in sorted(by_difference[:MAX_SHOWN_INSTANCES], key=lambda each: each[0])]


def _state(instance: InstancePlan, snapshot: Snapshot, state: str | None) -> dict[str, Any]:
    """Return where an instance runs, its load and its `state`, if that is a special one."""
    return {
        "name": instance.name,
        "state": state or ("draining" if instance.draining else "serving"),
        "devices": [device for stage in instance.stages for device in stage.devices],
        "tp": instance.tp,
        "stages": [
            {"devices": list(stage.devices), "layers": sum(is_layer(block.block) for block in stage.blocks)}
            for stage in instance.stages
        ],
        "lanes": instance.lanes,
        "draining": instance.draining,
        "running": snapshot.num_running,
        "held": snapshot.num_held,
        "waiting": snapshot.num_waiting,
        "kv_usage": snapshot.kv_usage,
    }


def _plain(snapshot: Snapshot) -> Mapping[str, Any]:
    fields = asdict(snapshot)
    fields["kv_usage"] = snapshot.kv_usage
    return fields
