"""bench/fused_steps.py on a tiny model."""

from pathlib import Path

import pytest

from bench import fused_steps


def test_both_ways_are_timed_for_every_batch(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_steps, "MANY", 8)
    rows = fused_steps.compare(tiny_model, "int4", [1, 2], repeats=1, load_format="dummy")
    assert [row["batch"] for row in rows] == [1, 2]
    assert all(row.keys() == {"batch", "blocks", "fused"} for row in rows)
