"""The scheduler test of the AMOEBA paper (4.2.4): the policy `tp_transform` and two schedulers that ignore degrees.

    python -m bench.sim.tp_scheduler [--quick]

Short requests of 1K tokens arrive 60 times a minute, long ones of 50K once a minute, at eight instances of one device
each. All systems can merge and split instances, at the same costs. Round-robin and least-load-first send each request
to an instance without asking whether it can hold it; if it cannot, it merges with its neighbours. The lengths of
answers are not given in the paper: with `SHORT_OUT`, eight instances of degree 1 are loaded to about two thirds.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from bench.sim.amoeba import Figures, built, cluster, options_of, report, served
from bench.sim.runs import table
from jaxserve.control.plan import Plan
from jaxserve.control.policies.tp_transform import TransformPolicy, TransformSettings, TransformState
from jaxserve.control.policy import PlanProposal, ServiceView
from jaxserve.scheduler.routing import Router
from jaxserve.sim.build import BuiltSimulation
from jaxserve.sim.simulation import SimRequest

SHORT_IN, LONG_IN = 1024, 50_000
SHORT_OUT, LONG_OUT = 2048, 1024
SYSTEMS = ("tp_transform", "round-robin", "least-load-first")


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


def rows(links: str, seconds: float, seeds: int) -> list[tuple[object, ...]]:
    """Return the rows of one kind of links: means over the seeds."""
    figures: dict[str, list[Figures]] = {name: [] for name in SYSTEMS}
    times: dict[str, list[str]] = {}
    for seed in range(seeds):
        for name in SYSTEMS:
            made = system(name, links=links)
            figures[name].append(Figures.of(served(made, trace(seconds, seed))))
            times.setdefault(name, []).append(str(len(made.control.pauses) if made.control else 0))

    def mean(name: str, value: str) -> float:
        return float(np.mean([getattr(each, value) for each in figures[name]]))

    ours = mean(SYSTEMS[0], "goodput")
    return [
        (
            name,
            f"{mean(name, 'throughput'):.0f}",
            f"{mean(name, 'goodput'):.0f}",
            "" if name == SYSTEMS[0] else f"{ours / mean(name, 'goodput') - 1:+.1%}",
            f"{mean(name, 'within_slo'):.1%}",
            f"{mean(name, 'p95_ttft'):.1f}",
            f"{1e3 * mean(name, 'p95_tpot'):.0f}",
            ", ".join(times[name]),
        )
        for name in SYSTEMS
    ]


def main() -> None:
    """Run all systems, with both kinds of links, and report."""
    options = options_of(__doc__)
    seconds, seeds = (60.0, 1) if options.quick else (1800.0, 3)
    header = ("scheduler", "tokens/s", "within the SLO", "ours is better by", "requests within it", "P95 TTFT, s",
              "P95 TPOT, ms", "regroups")  # fmt: skip
    text = "# Schedulers of instances that merge, Qwen2.5-32B on 8 x H20, simulated\n\n"
    text += f"Answers of {SHORT_OUT} and {LONG_OUT} tokens, {seconds:g} s, {seeds} seeds.\n"
    for links, what in (("paper", "Links and longest contexts of the paper's table 1"), ("nvlink", "NVLink")):
        text += f"\n## {what}\n\n{table(header, rows(links, seconds, seeds))}\n"
    report(options, "tp-scheduler", text)


if __name__ == "__main__":
    main()
