"""Snapshots and the recent past as values: equality, copies, and sums over instances."""

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, fields, replace
from typing import Any

import pytest

from jaxserve.telemetry import Recent, Smoother, Snapshot, combine

VALUES = Recent(
    seconds=2.0,
    kv_usage=0.2,
    kv_trend=0.05,
    waiting=1.5,
    queue_delay=0.25,
    preemptions=3,
    ttft_p95=None,
    tpot=0.02,
    tokens_per_s=50.0,
    arrivals_per_s=0.5,
    max_kv_usage=0.25,
    max_wait=0.5,
)


def observed() -> Recent:
    """Return the recent past after two snapshots, equal to `VALUES`, of which nothing has been read."""
    smoother = Smoother()
    smoother.observe(Snapshot(time=1.0, kv_pages_total=400, kv_pages_used=60, num_waiting=1))
    last = Snapshot(
        time=3.0, kv_pages_total=400, kv_pages_used=100, num_waiting=2, oldest_wait=0.5, preemptions=3,
        generated_tokens=100, gaps=100, gap_seconds=2.0,
    )  # fmt: skip
    recent = smoother.observe(last).recent
    assert recent is not None
    return recent


@pytest.mark.parametrize(
    "copied",
    [
        lambda recent: recent,
        copy.copy,
        copy.deepcopy,
        replace,
        lambda recent: pickle.loads(pickle.dumps(recent)),
        lambda recent: Recent(**asdict(recent)),
    ],
)
def test_values_computed_when_read_are_those_of_a_plain_value(copied: Callable[[Any], Recent]) -> None:
    assert copied(observed()) == VALUES
    assert repr(copied(observed())) == repr(VALUES)
    assert hash(copied(observed())) == hash(VALUES)
    assert replace(copied(observed()), waiting=9.0) != VALUES


def test_recent_past_has_no_attributes_besides_its_fields() -> None:
    for recent in (observed(), VALUES):
        assert not hasattr(recent, "first")
        assert not hasattr(recent, "count")
        with pytest.raises(AttributeError, match="'Recent' object has no attribute 'mean'"):
            _ = recent.mean  # type: ignore[attr-defined]
        with pytest.raises(FrozenInstanceError):
            recent.waiting = 1.0  # type: ignore[misc]


def test_snapshot_with_other_values_is_a_copy() -> None:
    snapshot = Snapshot(time=1, steps=2, layers_by_precision={"int8": 3})
    assert snapshot.with_values(time=5.0, steps=7) == replace(snapshot, time=5.0, steps=7)
    assert snapshot == Snapshot(time=1, steps=2, layers_by_precision={"int8": 3})


def test_combined_snapshot_has_sums_and_extremes() -> None:
    one = Snapshot(**{f.name: 1 for f in fields(Snapshot) if f.type in ("int", "float", int, float)})
    one = replace(one, layers_by_precision={"int8": 3}, first_tokens=(1, 2))
    other = replace(one, time=2.0, plan_version=5, oldest_wait=7.0, layers_by_precision={"int8": 1, "int4": 2})
    both = combine([one, other, Snapshot()])
    assert (both.time, both.plan_version, both.oldest_wait) == (2.0, 5, 7.0)
    assert both.layers_by_precision == {"int8": 4, "int4": 2}
    assert both.first_tokens == (2, 4)
    added = set(asdict(one)) - {"time", "plan_version", "oldest_wait", "layers_by_precision", "first_tokens", "recent"}
    assert {name: getattr(both, name) for name in added} == dict.fromkeys(added, 2)
    assert both.recent is None


def test_combined_snapshot_can_be_sent_as_json() -> None:
    snapshot = Snapshot(layers_by_precision={"int4": 3})
    sent = json.loads(json.dumps(asdict(combine([snapshot, snapshot]))))
    assert sent["layers_by_precision"] == {"int4": 6}
