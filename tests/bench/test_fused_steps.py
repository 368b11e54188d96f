"""bench/fused_steps.py on a tiny model."""

from pathlib import Path

import pytest

from bench import fused_steps


def test_both_ways_are_timed_for_every_batch(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_steps, "MANY", 8)
    rows = fused_steps.compare(tiny_model, "int4", [1, 2], repeats=1, load_format="dummy")
    assert [row["batch"] for row in rows] == [1, 2]
    assert all(row.keys() == {"batch", "blocks", "fused"} for row in rows)


def test_without_options_it_is_the_bundled_model_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fused_steps, "MANY", 8)
    monkeypatch.setattr("sys.argv", ["fused_steps", "--batches", "1", "--repeats", "1"])
    fused_steps.main()
    assert "batch 1   block by block" in capsys.readouterr().out
