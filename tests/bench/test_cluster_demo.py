"""The cluster demonstration: what it counts, and which devices it takes."""

import pytest

from bench.cluster_parts import setup
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
        {"name": "3", "devices": [3], "draining": False},
        {"name": "4", "devices": [0, 1], "draining": True},
    ]
    assert described(states) == "4 (devices 0 1, draining)  3 (devices 3)"


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
