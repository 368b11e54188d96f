"""Adaptation beside none, in random worlds: whatever is short and however fast fewer bits are, it does no harm."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from jaxserve.core.errors import JaxserveError
from jaxserve.sim.build import build_simulation
from jaxserve.sim.cost_model import RooflineModel
from tests.sim.worlds import SPEEDS, Summary, World, summary, world
from tests.support.internals import simulated_devices
from tests.support.thorough import some

MODES = ["morph", "morph-performance"]
POINTS = 0.02  # of violations that a run may have more than one without adaptation
REQUESTS = 2  # that may miss the objective in addition, in runs of few requests


def load_of(seed: int) -> float:
    """Return a load from 0.2 to 3 times what full precision can serve."""
    return float(np.random.default_rng(10_000 + seed).uniform(0.2, 3.0))


def assert_no_worse(adapted: Summary, static: Summary, requests: int, points: float = POINTS) -> None:
    assert adapted.violated <= static.violated + points + REQUESTS / requests
    assert adapted.restored


def compare(where: World, mode: str, load: float, seed: int, instances: int = 1, **options: Any) -> None:
    """Check that a mode violates the objective no more often than full precision alone."""
    traffic = where.traffic(load, seed, instances=instances)
    static = where.run("static", traffic, instances=instances)
    assert_no_worse(where.run(mode, traffic, instances=instances, **options), static, len(traffic))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", some(range(30), 3))
def test_one_instance_is_never_worse_than_full_precision(seed: int, mode: str) -> None:
    compare(world(seed), mode, load_of(seed), seed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("instances", "seed"), some([(2, 30), (4, 11), (4, 29), (8, 32), (16, 24)], 2))
def test_many_instances_are_never_worse_than_full_precision(instances: int, seed: int, mode: str) -> None:
    compare(world(seed), mode, load_of(seed), seed, instances)


@pytest.mark.parametrize(("seed", "load"), some(product([14, 79, 94], [0.2, 0.4]), 2))
@pytest.mark.parametrize("speed", SPEEDS)
def test_server_that_holds_its_objective_is_left_alone(speed: str, load: float, seed: int) -> None:
    roomy = world(seed, speed=speed, short="nothing", platform="gpu")
    traffic = roomy.traffic(load, seed)
    static, adapted = (roomy.run(policy, traffic) for policy in ("static", "morph"))
    assert static.p95_ttft < 0.5
    assert adapted == static


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", some(range(5), 1))
def test_fewer_bits_that_turn_out_slower_are_a_mistake_of_seconds(seed: int, mode: str) -> None:
    """The policy believes that fewer bits are faster, and finds out that they are slower."""
    slower, believed = world(seed, speed="slower"), world(seed, speed="faster")
    traffic = slower.traffic(1.2, seed, seconds=240.0)
    static = slower.run("static", traffic)
    cluster = slower.cluster(mode)
    told = replace(cluster, believed_costs=RooflineModel(cluster.shape, believed.hardware))
    built = build_simulation(told, detailed=False, interval=0)
    adapted = summary(built, traffic)
    assert_no_worse(adapted, static, len(traffic), points=0.05)
    assert adapted.p95_ttft <= 1.2 * static.p95_ttft


def refuse(*_: Any) -> Iterator[None]:
    """Refuse a transition, while it is being prepared."""
    raise JaxserveError("the device refuses")
    yield


@pytest.mark.parametrize("mode", MODES)
def test_instance_whose_changes_fail_holds_up_no_other(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short = world(11, speed="faster", short="pages")
    traffic = short.traffic(1.3, 11, instances=4)
    static = short.run("static", traffic, instances=4)
    built = short.build(mode, 4)
    devices = simulated_devices(built)
    monkeypatch.setattr(devices["0"], "prepare_layer", refuse)
    adapted = summary(built, traffic)
    assert built.control is not None
    done = {decision.instance for decision in built.control.decisions if decision.outcome == "done"}
    failed = {decision.instance for decision in built.control.decisions if decision.outcome.startswith("failed")}
    assert (done, failed) == ({"1", "2", "3"}, {"0"})
    assert_no_worse(adapted, static, len(traffic))
    assert adapted.violated < static.violated - 0.2, "the other three have adapted"
