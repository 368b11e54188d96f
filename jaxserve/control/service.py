"""The control plane, which runs an engine's controller in a thread and serves operators' requests about the plan."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from jaxserve.control.controller import Controller
from jaxserve.control.ledger import DeviceLedgers
from jaxserve.control.plan_yaml import from_yaml, to_dict, to_yaml
from jaxserve.control.policy import Policy
from jaxserve.control.resources import Resources
from jaxserve.core.block_names import is_layer
from jaxserve.core.clock import Clock
from jaxserve.core.errors import ConfigError, RequestError
from jaxserve.telemetry import Snapshot, combine

log = logging.getLogger(__name__)


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
        policy_names: Iterable[str],
        load_policy: Callable[..., Policy],
        started_with: str,
    ):
        """`snapshots()` returns the latest snapshot of each instance by its name.

        `load_policy(name)` returns a policy of `policy_names`, and takes a plan as `target` for "manual".
        `started_with` is the name or the file of the controller's present policy. That policy can be set again by the
        same text, so that no request over HTTP makes the engine read or run a file.
        """
        self._controller, self._resources, self._ledgers, self._clock = controller, resources, ledgers, clock
        self._snapshots = snapshots
        self._max_pages = sum(resources.max_capacity(instance) - 1 for instance in controller.plan.instances)
        self._policy_names = tuple(dict.fromkeys((*policy_names, started_with)))
        self._load_policy, self._first = load_policy, (started_with, controller.policy)
        self._policy_name = started_with  # as it was given
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxserve-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. The caller closes the actuator. May be called several times."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._controller.interval):
            try:
                self._controller.tick(self._clock.now(), self._snapshots())
            except Exception:
                log.exception("the control plane failed; the plan in force stays")

    # -- what operators see

    def plan_yaml(self) -> str:
        return to_yaml(self._controller.plan)

    def plan_dict(self) -> dict[str, Any]:
        return to_dict(self._controller.plan)

    def status(self) -> dict[str, Any]:
        controller, snapshot = self._controller, combine(list(self._snapshots().values()))
        plan, target, fullest = controller.plan, controller.target, self._ledgers.fullest
        layers = [[asdict(b) for b in i.blocks if is_layer(b.block)] for i in plan.instances]
        pages = sum(instance.kv_pages - 1 for instance in plan.instances)
        return {
            "time": self._clock.now(),
            "policy": controller.policy.name,
            "policies": list(self._policy_names),
            "plan_version": plan.version,
            "target_version": None if target is None else target.version,
            "busy": controller.busy,
            "note": controller.note,
            "budget": fullest.budget,
            "ledger": dict(fullest.entries),
            "devices": [{"device": device, "used": ledger.used} for device, ledger in self._ledgers.items()],
            "layers": layers,
            "kv_pages": {
                "used": snapshot.kv_pages_used,
                "total": pages,
                "most": self._max_pages,
            },
            "snapshot": _plain(snapshot),
            "slo_ttft": getattr(controller.policy, "slo_ttft", None),
        }

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

    def set_policy(self, name: str) -> None:
        shown = name[:100]
        if name not in self._policy_names:
            names = ", ".join(self._policy_names)
            raise RequestError(f"unknown policy {shown!r}: choose from {names}", field="policy", value=shown)
        first_name, first = self._first
        try:
            policy = first if name == first_name else self._load_policy(name)
        except ConfigError as error:  # e.g. no variants to change to
            raise RequestError(str(error), field="policy", value=shown) from error
        with self._lock:
            self._change(policy, name, "")

    def set_plan(self, yaml_text: str) -> None:
        try:
            plan = from_yaml(yaml_text)
        except ConfigError as error:
            raise RequestError(str(error), field="plan") from error
        with self._lock:
            self._controller.check(plan)
            self._change(self._load_policy("manual", target=plan), "manual", "a plan, ")

    def _change(self, policy: Policy, name: str, what: str) -> None:
        """Set another policy and record it. Call with the lock held."""
        self._controller.change_policy(self._clock.now(), policy, f"{what}policy {self._policy_name} -> {name}")
        self._policy_name = name


def _plain(snapshot: Snapshot) -> Mapping[str, Any]:
    fields = asdict(snapshot)
    fields["kv_usage"] = snapshot.kv_usage
    return fields
