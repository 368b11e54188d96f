"""bench.fused_steps on a tiny model."""

from pathlib import Path

import pytest

from bench import fused_steps
from jaxserve.core.bundled import bundled_model_path


@pytest.mark.parametrize("precision", ["auto", "int4"])
def test_fused_steps_times_both_tiers_for_every_batch(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setattr(fused_steps, "MANY", 8)
    small = {"load_format": "dummy", "max_num_batched_tokens": 2 + 32}
    rows = fused_steps.compare(tiny_model, precision, [1, 2], repeats=1, **small)
    assert [row["batch"] for row in rows] == [1, 2]
    assert all(row.keys() == {"batch", "blocks", "fused"} for row in rows)


def test_fused_steps_by_default_measures_the_bundled_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compared = []

    def compare(*given: object) -> list[dict[str, float]]:
        compared.append(given)
        return [{"batch": 1, "blocks": 2.0, "fused": 1.0}]

    monkeypatch.setattr(fused_steps, "compare", compare)
    monkeypatch.setattr("sys.argv", ["fused_steps", "--batches", "1", "--repeats", "1"])
    fused_steps.main()
    assert compared == [(bundled_model_path(), "auto", [1], 1)]
    assert "batch 1   block by block   2.00   fused   1.00" in capsys.readouterr().out
