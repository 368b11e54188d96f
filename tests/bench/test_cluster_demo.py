"""The cluster demonstration: what it counts, and which devices it takes."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from bench.cluster_parts import drops, setup
from bench.cluster_parts.load import longest_gap
from bench.cluster_parts.setup import Setup
from bench.cluster_parts.watch import described, merges_and_splits
from jaxserve.bench.record import RequestRecord
from jaxserve.core.errors import ConfigError


def test_merges_and_splits_are_counted_where_they_were_carried_out():
    transitions = [
        ["instance 0 and 1 -> 4 (devices 0, 1)"],
        ["instance 1: layers.3 int4 -> bfloat16", "instance 2 and 3 -> 5 (devices 2, 3)"],
        ["instance 5 -> 6 (devices 2) and 7 (devices 3)"],
        ["add instance 8 (devices 5)", "remove instance 6"],
        ["instance 7 -> 9 (devices 7)"],
    ]
    decisions = [{"transitions": each, "outcome": "done"} for each in transitions]
    assert merges_and_splits(decisions) == (2, 1)
    failed = [{"transitions": transitions[0], "outcome": "failed: no memory"}]
    assert merges_and_splits(failed) == (0, 0)


def test_instances_are_described_in_the_order_of_their_devices():
    states = [
        {"name": "3", "devices": [3], "draining": False, "lanes": 1},
        {"name": "4", "devices": [0, 1], "draining": True, "lanes": 1},
        {"name": "5", "devices": [2, 4], "draining": False, "lanes": 2},
    ]
    assert described(states) == "4 (devices 0 1, draining)  5 (stages on devices 2 4)  3 (devices 3)"


@dataclass
class DroppingServer:
    """A server in place of `Watch` and `Load`: what it has after a burst, and whether it restores its layers."""

    pages: int  # of the group that two instances with 32 pages each become; 0 if they drop no layers
    restores: bool = True
    url: str = ""
    asked: bool = False  # for answers to a burst
    over: bool = False  # the burst

    async def look(self) -> dict[str, Any]:
        names = ("2",) if self.pages and self.asked and not (self.over and self.restores) else ("0", "1")
        states = [{"name": name, "lanes": 3 - len(names)} for name in names]
        total = self.pages if len(names) == 1 else 64
        return {"instance_states": states, "busy": False, "kv_pages": {"total": total}}

    async def until(self, condition: Callable[[Mapping[str, Any]], bool], timeout_s: float) -> bool:
        await asyncio.sleep(0)
        return condition(await self.look())

    async def set_policy(self, name: str) -> None:
        assert name == ("static" if self.asked else "param_drop")

    async def burst(self, count: int) -> list[RequestRecord]:
        self.asked = True
        return [RequestRecord(0, 0.0, 0.0, 1, chunk_times_s=[1.0, 2.0], end_s=2.0)] * count


@pytest.mark.parametrize(
    ("server", "faults"),
    [
        (DroppingServer(96), []),
        (DroppingServer(0), ["no instances dropped layers in the burst", "the drop left 64 KV pages of 64"]),
        (DroppingServer(96, restores=False), ["not all layers were restored"]),
        (DroppingServer(64), ["the drop left 64 KV pages of 64"]),
    ],
)
def test_burst_must_have_layers_dropped_for_more_pages_and_restored(server, faults, monkeypatch, tmp_path):
    monkeypatch.setattr(drops, "save_dashboard", lambda *_: setattr(server, "over", True))
    found = asyncio.run(drops.served_burst(server, server, Setup(2, virtual=True), tmp_path, 1.0))
    assert found["faults"] == faults
    assert found["burst"]["answered"] == found["burst_without_drop"]["answered"] == 2 * drops.BURST


def test_longest_gap_is_that_of_parts_since_a_time():
    early = RequestRecord(0, 0.0, 0.0, 1, chunk_times_s=[0.0, 2.0, 3.0])
    late = RequestRecord(1, 5.0, 5.0, 1, chunk_times_s=[6.0, 6.5, 6.6])
    assert longest_gap([early, late]) == 2.0
    assert longest_gap([early, late], since_s=2.0) == 1.0
    assert longest_gap([early, late], since_s=3.0) == 0.5
    assert longest_gap([], since_s=3.0) == 0.0


@pytest.mark.parametrize(("accelerators", "instances"), [(2, 2), (3, 2), (7, 4), (16, 8)])
def test_demonstration_takes_the_accelerators_that_instances_can_share(monkeypatch, accelerators, instances):
    monkeypatch.setattr(setup, "_accelerators", lambda: accelerators)
    assert Setup.of("auto") == Setup.of("gpu") == Setup(instances, virtual=False)
    assert Setup.of("virtual") == Setup(4, virtual=True)


def test_demonstration_needs_two_accelerators_or_virtual_devices(monkeypatch):
    monkeypatch.setattr(setup, "_accelerators", lambda: 1)
    assert Setup.of("auto").virtual
    with pytest.raises(ConfigError, match="two devices or more: JAX finds 1"):
        Setup.of("gpu")
