"""A fake control plane that depends on time alone: a burst every five minutes turns layers to int4 and back."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxserve.control.plan import InstancePlan, Plan, StagePlan, block_chain
from jaxserve.control.plan_yaml import from_yaml, to_dict, to_yaml
from jaxserve.core.errors import ConfigError, PlanError, RequestError
from jaxserve.telemetry import ControlState, KVCapacity

CYCLE = 300  # seconds from one burst to the next
# Seconds of a cycle at which the first layers turn to int4, and at which layers begin to return.
FIRST, LAST = 66, 172
# A moment in the second burst, when the history has the first.
DURING = CYCLE + FIRST + 20
ORDER = (9, 10, 8, 11, 7, 12, 6, 13, 5, 14)  # the layers that may turn to int4
BFLOAT16, INT4, PAGE = 121_634_816, 34_210_816, 2_097_152  # bytes of a layer, and of a page in all layers
BUDGET, FIXED, EMBEDDING = 5_000_000_000, 610_000_000, 525_336_576
ROUNDING = 32 << 20  # bytes of the pools beyond their pages
LAYERS = 16
NOTE = "held after a relapse: 12.0 arrivals/s > 75% of 14.0, for 320 s more"  # while layers are in int4
SLO = 2.0
POLICIES = ("static", "manual", "morph", "morph-performance")


def int4_layers(time: float) -> int:
    """Return the number of layers in int4, which grows by two every 1.5 s and later falls one by one."""
    moment = time % CYCLE
    if moment < LAST:
        return min(len(ORDER), 2 * max(0, math.ceil((moment - FIRST) / 1.5)))
    return max(0, len(ORDER) - math.floor((moment - LAST) * 1.25))


def pages(int4: int) -> int:
    """Return the number of KV pages that fit with `int4` layers in int4."""
    weights = EMBEDDING + LAYERS * BFLOAT16 - int4 * (BFLOAT16 - INT4)
    return (BUDGET - FIXED - ROUNDING - weights) // PAGE


def plan_at(time: float) -> Plan:
    """Return the plan in force. Each change of a layer has its own version."""
    turned = set(ORDER[: int4_layers(time)])
    chain = block_chain("bfloat16", ["int4" if i in turned else "bfloat16" for i in range(LAYERS)], "bfloat16")
    version = 1 + int(time // CYCLE) * 4 * len(ORDER)
    version += len(turned) if time % CYCLE < LAST else 2 * len(ORDER) - len(turned)
    return Plan(version, (InstancePlan((StagePlan(chain, (0,), pages(len(turned))),)),))


def sample_at(time: float) -> dict[str, Any]:
    """Return the sample of the history at `time`."""
    moment = time % CYCLE
    rise = 1 / (1 + math.exp(-(moment - 58) / 4)) * 1 / (1 + math.exp((moment - 158) / 6))  # load, 0 to 1
    wave = 0.5 * math.sin(time * 0.37) + 0.5 * math.sin(time * 0.11 + 1)  # keeps curves from being smooth
    crush = math.exp(-(((moment - 69) / 7) ** 2))  # load before memory was freed for it
    total = pages(int4_layers(time))
    usage = min(0.995, 0.12 + 0.62 * rise + 0.3 * crush + 0.03 * wave)
    idle = moment > 240
    turned = int4_layers(time)
    counts = Counter({"bfloat16": LAYERS - turned, "int4": turned})
    return {
        "time": time,
        "precisions": dict(+counts),
        "weight_bytes": EMBEDDING + LAYERS * BFLOAT16 - turned * (BFLOAT16 - INT4),
        "kv_used_bytes": int(usage * total) * PAGE,
        "kv_free_bytes": (total - int(usage * total)) * PAGE,
        "kv_rounding_bytes": ROUNDING,
        "other_bytes": FIXED,
        "budget": BUDGET,
        "waiting": max(0, round(26 * crush + 1.5 * rise * (1 + wave))),
        "running": max(0, round(4 + 28 * rise + 2 * wave)),
        "ttft_p95": None if idle else 0.21 + 0.35 * rise + 3.2 * crush + 0.05 * wave,
        "prompt_tokens_per_s": 0.0 if idle else 300 + 2400 * rise + 40 * wave,
        "generated_tokens_per_s": 0.0 if idle else 70 + 1400 * rise + 20 * wave,
        "tpot": None if idle else 0.0142 + 0.0046 * rise + 0.006 * crush + 0.0004 * wave,
        "kv_usage": usage,
    }


def decisions_until(time: float) -> list[dict[str, Any]]:
    """Return all decisions until `time`: in each cycle five that swap and one that restores. The first one failed."""
    found = []
    for cycle in range(int(time // CYCLE) + 1):
        start = cycle * CYCLE
        for step in range(len(ORDER) // 2):
            when = start + FIRST + 1.5 * step
            usage, delay = 0.87 + 0.02 * step, 140 + 220 * step
            reason = f"KV usage {usage * 100:.0f} % is above 85 %, the oldest request waits {delay} ms (limit 100 ms)"
            found.append(_decision(when, reason, ORDER[2 * step : 2 * step + 2], "bfloat16", "int4", time))
        reason = "nothing waiting for 5 s, no preemption, KV usage 24 % fits the smaller pool and is falling"
        found.append(_decision(start + LAST, reason, ORDER[::-1], "int4", "bfloat16", time, seconds=8))
    found[0]["outcome"] = "failed: layers.10 bfloat16 -> int4: no memory for 34.2 MB next to the layer in use"
    return [decision for decision in found if decision["time"] <= time]


def _decision(
    when: float, reason: str, layers: tuple[int, ...], before: str, after: str, now: float, seconds: float = 0.9
) -> dict[str, Any]:
    version = plan_at(when).version
    swaps = [f"instance 0: layers.{i} {before} -> {after} (frees 87.4 MB, about 41 ms)" for i in layers]
    grow = f"instance 0: KV {pages(0)} -> {pages(len(layers))} pages (needs 174.9 MB)"
    return {
        "time": when,
        "policy": "morph",
        "reason": reason,
        "before_version": version,
        "target_version": version + len(layers),
        "transitions": [*swaps, grow] if after == "int4" else [grow, *swaps],
        "outcome": "started" if now < when + seconds else "done",
    }


@dataclass
class Time:
    """A clock that shows the time to which it has been set."""

    value: float

    def __call__(self) -> float:
        return self.value


@dataclass
class FakeControl:
    """A ControlClient that shows the burst at `now()`, until an operator sets a plan."""

    now: Callable[[], float] = lambda: 80.0
    policy: str = "morph"
    plan: Plan | None = None  # the operator's
    asked: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def plan_yaml(self) -> str:
        return to_yaml(self._plan())

    def plan_dict(self) -> dict[str, Any]:
        return to_dict(self._plan())

    def status(self) -> dict[str, Any]:
        time, plan = self.now(), self._plan()
        sample = sample_at(time)
        started = [d for d in self.decisions(1) if d["outcome"] == "started"]
        used = sample["kv_used_bytes"] // PAGE
        return {
            "time": time,
            "policy": self.policy,
            "policies": list(POLICIES),
            "plan_version": plan.version,
            "target_version": started[0]["target_version"] if started else None,
            "busy": bool(started),
            "note": NOTE if int4_layers(time) and not started else "",
            "budget": BUDGET,
            "devices": [{"device": 0, "used": BUDGET // 2}],
            "ledger": {
                "weights": sample["weight_bytes"],
                "kv": sample["kv_used_bytes"] + sample["kv_free_bytes"] + ROUNDING,
                "runtime": 420_000_000,
                "workspace": 190_000_000,
            },
            "num_instances": len(plan.instances),
            "instances": [instance.name for instance in plan.instances],
            "instance_states": [
                {
                    "name": instance.name,
                    "devices": sorted(instance.devices),
                    "tp": instance.tp,
                    "stages": [
                        {"devices": list(s.devices), "layers": sum(b.block.startswith("layers.") for b in s.blocks)}
                        for s in instance.stages
                    ],
                    "lanes": instance.lanes,
                    "state": "draining" if instance.draining else "serving",
                    "draining": instance.draining,
                    "running": sample["running"],
                    "held": 0,
                    "waiting": sample["waiting"],
                    "kv_usage": sample["kv_usage"],
                }
                for instance in plan.instances
            ],
            "waiting_room": {"requests": 0, "tokens": 0, "longest_tokens": 0, "oldest_seconds": 0.0},
            "layers": [
                [{"block": b.block, "precision": b.precision} for b in i.blocks if b.block.startswith("layers.")]
                for i in plan.instances
            ],
            "precisions": dict(Counter(precision for i in plan.instances for precision in i.layer_precisions)),
            "kv_pages": {"used": used, "total": pages(int4_layers(time)), "most": pages(len(ORDER))},
            "snapshot": {"num_running": sample["running"], "num_waiting": sample["waiting"], "kv_pages_used": used},
            "slo_ttft": SLO,
            "slo_tpot": None,
            "max_quality_loss": None,
            "quality": {"loss": 0.004 * int4_layers(time), "nats": None, "floor": 0.05, "measured": False},
        }

    def state(self) -> ControlState:
        tokens, most = (16 * pages(layers) for layers in (int4_layers(self.now()), len(ORDER)))
        return ControlState({"0": KVCapacity(tokens, most, 0.04)})

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        return decisions_until(self.now())[-limit:]

    def history(self, since: float = -1) -> list[dict[str, Any]]:
        last = math.floor(self.now())
        return [sample_at(time) for time in range(max(0, last - 899), last + 1) if time > since]

    def policy_in_force(self) -> dict[str, Any]:
        objectives = {"slo_ttft": SLO, "slo_tpot": None, "max_quality_loss": None}
        return {"policy": self.policy, "source": self.policy, "settings": self.settings, "objectives": objectives}

    def set_policy(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        if name not in POLICIES:
            known = ", ".join(POLICIES)
            raise RequestError(f"unknown policy {name!r}: choose from {known}", field="policy", value=name, limit=known)
        self.policy, self.plan, self.settings = name, None, dict(settings or {})

    def set_plan(self, yaml_text: str) -> None:
        self.asked.append(yaml_text)
        try:
            plan = from_yaml(yaml_text)
        except ConfigError as error:
            raise RequestError(str(error), field="plan") from error
        limit = pages(len(ORDER))
        asked = max(stage.kv_pages for instance in plan.instances for stage in instance.stages)
        if asked > limit:
            raise PlanError(f"instance 0 has {asked} KV pages, at most {limit} fit")
        self.policy, self.plan = "manual", replace(plan, version=self._plan().version + 1)

    def edit_plan(
        self,
        action: str,
        instances: Sequence[str] = (),
        *,
        into: int | None = None,
        devices: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Carry out a change at once, and only one that drains."""
        if action != "drain":
            raise PlanError(f"{action} {' '.join(instances)} is impossible here ({into}, {devices})")
        plan = self._plan()
        self.policy, self.plan = "manual", plan.with_instance(plan.instance(instances[0]).with_draining(True))
        return to_dict(self.plan)

    def _plan(self) -> Plan:
        return self.plan or plan_at(self.now())


def control_in_burst(instances: int = 1, layers: int = 16, **status: Any) -> FakeControl:
    """Return a control plane in the middle of a burst, with layers in all precisions and `status` overridden."""
    control = FakeControl(Time(DURING))
    shown, samples = control.status(), control.history()
    names = ("bfloat16", "int8", "int4", "int3")
    shown["layers"] = [
        [{"block": f"layers.{n}", "precision": names[(n + i) % 4]} for n in range(layers)] for i in range(instances)
    ]
    shown |= {"num_instances": instances, "instances": [str(index) for index in range(instances)]}
    shown["precisions"] = dict(Counter(layer["precision"] for each in shown["layers"] for layer in each))
    for sample in samples:
        sample["precisions"] = dict.fromkeys(names, instances * layers // 4)
    control.status = lambda: shown | status
    control.history = lambda since=-1: [sample for sample in samples if sample["time"] > since]
    return control
