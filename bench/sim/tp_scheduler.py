"""The scheduler test of the AMOEBA paper (4.2.4): the policy `tp_transform` and two schedulers that ignore degrees.

    python -m bench.sim.tp_scheduler [--quick]

Short requests of 1K tokens arrive 60 times a minute, long ones of 50K once a minute, at eight instances of one device
each. All systems can merge and split instances, at the same costs. Round-robin and least-load-first send each request
to an instance without asking whether it can hold it; if it cannot, it merges with its neighbours. The lengths of
answers are not given in the paper: with `SHORT_OUT`, eight instances of degree 1 are loaded to about three quarters.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from bench.sim.amoeba import built, cluster
from jaxserve.control.plan import Plan
from jaxserve.control.policies.tp_transform import TransformPolicy, TransformSettings, TransformState
from jaxserve.control.policy import PlanProposal, ServiceView
from jaxserve.scheduler.routing import Router
from jaxserve.sim.build import BuiltSimulation
from jaxserve.sim.simulation import SimRequest

SHORT_IN, LONG_IN = 1024, 50_000
SHORT_OUT, LONG_OUT = 1024, 1024


class BlindRouter(Router):
    """A router that chooses an instance without asking whether it can hold the request.

    If it cannot, the request waits for this instance to merge (`pinned`).
    """

    def __init__(self, in_turn: bool):
        """With `in_turn`, instances are chosen in turn, and otherwise by their load."""
        super().__init__()
        self.in_turn, self.pinned, self._turn = in_turn, "", 0

    def choose(self, needed: int) -> str | None:
        name = self.pinned if self.pinned in self._index and needed > self._held_by_all else self._next()
        if self.capacity_of(name) < needed:
            self.pinned = name
            return None
        if name == self.pinned:
            self.pinned = ""
        return name

    def _next(self) -> str:
        names = [route.name for route in self._routes if not route.draining] or [r.name for r in self._routes]
        if self.in_turn:
            self._turn += 1
            return names[self._turn % len(names)]
        return min(names, key=lambda name: self._loads[self._index[name]])


class BlindPolicy(TransformPolicy):
    """A policy that merges the instance which the router has chosen with its neighbours."""

    router: BlindRouter

    def _make_room(
        self, view: ServiceView, plan: Plan, state: TransformState, need: int
    ) -> PlanProposal[TransformState]:
        pinned = next((instance for instance in plan.instances if instance.name == self.router.pinned), None)
        if pinned is None or self._max_len(pinned.tp) >= need:
            return PlanProposal(plan, state, "the request finds an instance")
        degree = min(degree for degree in self._groups(state) if self._max_len(degree) >= need)
        (group,) = [devices for devices in self._groups(state)[degree] if pinned.devices <= set(devices)]
        members = self._members(plan, group)
        assert members is not None, "instances that hold less are parts of the group"
        *own, merged = self._merged(plan, state, members, degree)
        if pinned in own:
            self.router.pinned = merged.name
        kept = tuple(instance for instance in plan.instances if instance not in own)
        reason = f"instance {pinned.name} cannot hold a request of {need} tokens"
        return PlanProposal(Plan(plan.version + 1, (*kept, merged)), replace(state, names=(merged.name,)), reason)


def system(name: str, **options: Any) -> BuiltSimulation:
    """Return the simulation of a system."""
    made = built(cluster("tp_transform", **options))
    if name == "tp_transform":
        return made
    router = BlindRouter(name == "round-robin")
    policy = BlindPolicy(cluster("tp_transform", **options).resources, TransformSettings(), name=name)
    policy.router = router
    front, control = made.simulation.front, made.control
    assert control is not None
    front.directory._router = router
    front.directory.follow(front.instances)
    control._controller.set_policy(policy)
    return made


def trace(seconds: float, seed: int = 0, short_per_min: float = 60.0) -> list[SimRequest]:
    """Return the requests of the test."""
    rng = np.random.default_rng(seed)
    short = np.cumsum(rng.exponential(60 / short_per_min, int(seconds * 2)))
    long = np.cumsum(rng.exponential(60.0, int(seconds / 20)))
    return [
        *(SimRequest(float(time), SHORT_IN, SHORT_OUT) for time in short if time < seconds),
        *(SimRequest(float(time), LONG_IN, LONG_OUT) for time in long if time < seconds),
    ]
