"""What moves between devices when instances are regrouped, in bytes by link."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from jaxserve.control import InstancePlan
from jaxserve.control.movement import Movement, movement
from jaxserve.control.regroup import merged_plan, split_plans
from jaxserve.core.config import EngineConfig
from jaxserve.sim.cluster import resolve_cluster
from jaxserve.sim.hardware import load_hardware
from jaxserve.sim.shape import ModelShape

CLUSTER = resolve_cluster(
    EngineConfig(dp=8, max_tp=8, memory_gb=78), ModelShape.load("qwen2.5-32b"), load_hardware("h20")
)
RESOURCES, START = CLUSTER.resources, CLUSTER.memory.plan.instances
BLOCKS = START[0].blocks
PAGE = RESOURCES.page_bytes(START[0].stages[0])


def weights(degree: int) -> int:
    """Return the bytes of all weights on each of the devices of a degree."""
    return sum(RESOURCES.sizes.block(block.block, block.precision, degree) for block in BLOCKS)


def merged(*members: InstancePlan) -> InstancePlan:
    return merged_plan(members, "merged")


def sent(moved: Movement, device: int) -> int:
    return sum(size for (source, _), size in moved.links.items() if source == device)


def received(moved: Movement, device: int) -> int:
    return sum(size for (_, target), size in moved.links.items() if target == device)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_no_weights_cross_a_link_in_a_merge(count: int) -> None:
    members = START[:count]
    moved = movement(members, [merged(*members)], RESOURCES)
    assert moved.links == {}
    assert moved.host == {}
    assert moved.weights_first
    kept = moved.kept
    assert set(kept) == set(range(count))
    assert all(kept[device] == pytest.approx(weights(count), rel=1e-3) for device in kept)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_in_a_split_partners_send_the_weights_that_each_device_lacks(count: int) -> None:
    whole = merged(*START[:count])
    moved = movement([whole], split_plans(whole, [str(10 + n) for n in range(count)]), RESOURCES)
    lacking = weights(1) * (count - 1) / count
    assert moved.host == {}
    assert not moved.weights_first
    for device in range(count):
        assert received(moved, device) == pytest.approx(lacking, rel=1e-3)
        assert sent(moved, device) == pytest.approx(lacking, rel=1e-3), "partners share the work"
        assert moved.kept[device] == pytest.approx(weights(1) / count, rel=1e-3)


@pytest.mark.parametrize("count", [2, 4])
def test_devices_exchange_all_heads_of_the_pages_but_their_own(count: int) -> None:
    members = START[:count]
    moved = movement(members, [merged(*members)], RESOURCES, groups=100)
    assert set(moved.links.values()) == {100 * PAGE // count}
    assert all(received(moved, device) == 100 * PAGE * (count - 1) // count for device in range(count))
    assert set(moved.exchanged.values()) == {100 * PAGE}


def test_a_split_exchanges_what_the_merge_has_exchanged() -> None:
    whole = merged(*START[:2])
    parts = split_plans(whole, ["10", "11"])
    without, with_pages = (movement([whole], parts, RESOURCES, groups=groups) for groups in (0, 70))
    there = movement(START[:2], [whole], RESOURCES, groups=70)
    assert with_pages.bytes_by_link - without.bytes_by_link == there.bytes_by_link


def test_merged_instances_merge_among_devices_at_the_same_place() -> None:
    low, high = merged(*START[:2]), replace(merged(*START[2:4]), name="high")
    moved = movement([low, high], [merged(low, high)], RESOURCES, groups=10)
    assert set(moved.links) == {(0, 2), (2, 0), (1, 3), (3, 1)}


def test_a_new_instance_gets_its_weights_from_one_that_stays() -> None:
    moved = movement([], [START[1]], RESOURCES, others=[START[0]])
    assert moved.links == {(0, 1): pytest.approx(weights(1), rel=1e-3)}
    assert moved.host == {}
    assert moved.change[1] == RESOURCES.device_bytes(START[1])[1]


def test_weights_that_no_device_has_come_from_the_host() -> None:
    moved = movement([], [START[1]], RESOURCES)
    assert moved.links == {}
    assert moved.host == {1: pytest.approx(weights(1), rel=1e-3)}


def test_a_merge_needs_room_for_its_largest_block_and_the_pages_of_one_call() -> None:
    members = START[:2]
    largest = max(RESOURCES.sizes.block(block.block, block.precision, 2) for block in BLOCKS)
    moved = movement(members, [merged(*members)], RESOURCES, groups=1000)
    assert set(moved.peak.values()) == {largest + 2 * RESOURCES.exchanged_pages * PAGE // 64}


@given(groups=st.integers(0, 2000), count=st.sampled_from([2, 4, 8]))
def test_what_is_sent_is_received(groups: int, count: int) -> None:
    whole = merged(*START[:count])
    for before, after in (
        (START[:count], [whole]),
        ([whole], split_plans(whole, list(map(str, range(20, 20 + count))))),
    ):
        moved = movement(before, after, RESOURCES, groups)
        assert sum(sent(moved, device) for device in range(8)) == moved.bytes_by_link


def test_seconds_follow_from_the_slowest_device() -> None:
    moved = Movement(
        kept={0: 100, 1: 300},
        exchanged={0: 500},
        links={(0, 1): 40, (0, 2): 60, (2, 1): 10},
        host={3: 9},
        calls=7,
    )
    rates = replace(RESOURCES, link_rate=10.0, copy_rate=3.0, memory_rate=100.0, link_latency=0.5)
    assert moved.seconds(rates) == pytest.approx(100 / 10 + 9 / 3 + 600 / 100 + 7 * 0.5)


def test_rates_are_those_of_the_hardware() -> None:
    links = CLUSTER.hardware.links
    assert RESOURCES.link_rate == links["nvlink"].bandwidth
    assert RESOURCES.link_latency == links["nvlink"].latency
    assert RESOURCES.copy_rate == links["pcie"].bandwidth
    assert RESOURCES.memory_rate == CLUSTER.hardware.bandwidth / 2, "a copy reads and writes"
