"""The hardware files of GPUs are those that follow from the measured times of the H200, and reproduce them."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.sim import fit_gpu
from jaxserve.sim.hardware import Curve, from_yaml, load_hardware

RESULTS, BEFORE = (fit_gpu.Results.load(fit_gpu.RESULTS, "h200", before=before) for before in (False, True))
TOLERANCE = 0.066  # of the times that the H200's file gives; its products contain norms and activations
SHARES = [(8, 0.81, 0.50), (128, 1.29, 1.13), (512, 2.30, 2.29), (2048, 1.35, 1.34)]  # rows, int8 and int4


@pytest.mark.parametrize(
    ("path", "text"), list(fit_gpu.files(RESULTS, BEFORE)), ids=lambda value: getattr(value, "stem", "")
)
def test_a_file_is_what_follows_from_the_results(path: Path, text: str):
    assert path.read_text(encoding="utf-8") == text, "run python -m bench.sim.fit_gpu --write"


def test_the_file_of_the_h200_reproduces_what_was_measured():
    compared = fit_gpu.comparison(load_hardware("h200"), RESULTS)
    assert len(compared) > 20
    off = {case: simulated / measured - 1 for case, measured, simulated in compared}
    assert {case: error for case, error in off.items() if abs(error) > TOLERANCE} == {}


@pytest.mark.parametrize(("rows", "int8", "int4"), SHARES)
def test_fewer_bits_have_the_measured_share_of_bfloat16s_time(rows: int, int8: float, int4: float):
    full, *fewer = (RESULTS.products(name)[rows] for name in ("bfloat16", "int8", "int4"))
    assert [seconds / full for seconds in fewer] == pytest.approx([int8, int4], abs=0.01)
    full, *fewer = (fit_gpu.products_of(load_hardware("h200"), name)(rows) for name in ("bfloat16", "int8", "int4"))
    assert [seconds / full for seconds in fewer] == pytest.approx([int8, int4], rel=0.06)


def test_a_product_that_was_not_measured_takes_its_share_of_the_largest():
    found = RESULTS.products("int8")[8]
    largest = RESULTS.newer["int8"][8]
    others = (6144 * 4096, 4096 * 4096, 14336 * 4096)
    rest = sum(fit_gpu.LAUNCH + (largest - fit_gpu.LAUNCH) * weights / (28672 * 4096) for weights in others)
    assert found == pytest.approx(largest + rest)


def test_times_are_linear_between_rows_and_never_shorter_for_more():
    seconds = fit_gpu.linear({8: 3.0, 16: 2.0, 32: 4.0, 64: 5.0})
    assert [seconds(n) for n in (1, 8, 16, 24, 32, 64, 128)] == pytest.approx([2, 2, 2, 3, 4, 5, 7])


def test_a_curve_has_few_knots_and_the_times_it_was_made_of():
    hardware = load_hardware("l4")
    curve = fit_gpu.curve_of(lambda rows: 2e-3 + 6e-6 * rows, hardware, "int4")
    assert len(curve.knots) < len(fit_gpu.CANDIDATES) / 2
    for rows in fit_gpu.CANDIDATES:
        assert fit_gpu.roofline(hardware, "int4", rows) / curve(rows) == pytest.approx(2e-3 + 6e-6 * rows, rel=0.02)


def test_changes_of_layers_have_their_number_of_layers():
    found = {(change.layers, change.after) for change in RESULTS.changes}
    assert found == {(layers, after) for layers in (1, 4, 16) for after in ("int8", "int4", "bfloat16")}
    assert len(RESULTS.changes) == 18
    by_layer = [change.layer_seconds for change in RESULTS.changes if change.layers == 16]
    assert sorted(by_layer)[::2] == pytest.approx([0.0256, 0.0403, 0.0652], rel=0.01)


def test_only_fitted_numbers_are_rewritten():
    text = (fit_gpu.configs_path("hardware") / "h200.yaml").read_text(encoding="utf-8")
    known = from_yaml(text)
    other = replace(
        known,
        efficiency={**known.efficiency, "int4": Curve(((1, 0.5), (64, 0.25))), "attention": Curve(((1, 0.9),))},
        overheads=replace(known.overheads, layer=3e-5),
    )
    written = fit_gpu.rewritten(text, other)
    assert from_yaml(written) == other
    assert written.count("#") == text.count("#")


def test_a_changed_result_is_noticed(tmp_path, monkeypatch, capsys):
    for part in ("gpu", "gpu-serving", "gpu-transitions", "gpu-changes", "gpu-adaptation"):
        (tmp_path / part).mkdir()
        found = json.loads((fit_gpu.RESULTS / part / "h200.json").read_text(encoding="utf-8"))
        for row in found["steps"] if part == "gpu-serving" else ():
            row["median_decode_s"] += 1e-3
        (tmp_path / part / "h200.json").write_text(json.dumps(found), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["fit_gpu", "--results", str(tmp_path)])
    with pytest.raises(SystemExit) as exit_:
        fit_gpu.main()
    assert exit_.value.code == 1
    printed = capsys.readouterr().out
    assert "h200.yaml: differs from the results" in printed
    assert "| decode at batch 1, int4 | 2.681 |" in printed
