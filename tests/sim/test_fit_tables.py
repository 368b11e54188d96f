"""`bench.sim.fit_tables` recovers curves and links from tables that were made with them."""

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from bench.sim import fit_tables
from jaxserve.sim.hardware import Curve, Link, load_hardware
from jaxserve.sim.shape import ModelShape

CURVE = Curve(((1, 0.8), (64, 0.7), (128, 0.5), (256, 0.55), (512, 0.6), (1024, 0.65), (2048, 0.66), (4096, 0.6)))
OVERHEAD = 3e-5
NEAR, FAR = Link(1.7e11, 4e-5), Link(8e9, 2e-5)


def linear_rows(noise: float = 0.0) -> list[dict[str, str]]:
    """Return rows in the form of Vidur's: ms of the parts of a layer."""
    hardware, rng, rows = load_hardware("a100-80"), np.random.default_rng(0), []
    for model, tps in (("Meta-Llama-3-8B", (1, 2, 8)), ("Llama-2-70b-hf", (1, 4))):
        shape = ModelShape.load(fit_tables.MODELS[model])
        for tp in tps:
            for tokens in (1, 2, 4, 16, 32, 64, 128, 192, 256, 320, 512, 1024, 1500, 2048, 3000, 4096):
                reading = shape.layer_bytes("bfloat16", tp) / hardware.bandwidth
                roofline = max(reading, tokens * shape.layer_ops(tp) / hardware.rate("bfloat16"))
                seconds = (roofline / CURVE(tokens) + OVERHEAD) * (1 + noise * rng.uniform(-1, 1))
                parts = {part: str(1e3 * seconds / 6) for part in fit_tables.PARTS}
                rows.append({"gpu": "a100", "model": model, "tp": str(tp), "tokens": str(tokens), **parts})
    return rows


def network_rows() -> list[dict[str, str]]:
    rows = []
    for size in (2048, 65536, 2**20, 2**24, 2**26):
        for workers in (2, 4, 8):
            seconds = 2 * (workers - 1) / workers * size / NEAR.bandwidth + NEAR.latency
            rows.append(("all_reduce", workers, size, workers, seconds))
        rows.append(("send_recv", 2, size, 1, FAR.seconds(size)))
        rows.append(("send_recv", 2, size, 2, 1.0))  # within a host: must be ignored
    names = ("collective", "workers", "bytes", "devices_per_node")
    return [
        {"node": "a100_dgx", "median_ms": str(1e3 * row[-1])} | dict(zip(names, map(str, row), strict=False))
        for row in rows
    ]


def test_a_curve_and_the_overhead_of_a_layer_are_found_again():
    layers = fit_tables.layers_of(linear_rows(), "a100", load_hardware("a100-80"))
    curve, overhead = fit_tables.fit_layers(layers)
    assert [tokens for tokens, _ in curve.knots] == [tokens for tokens, _ in CURVE.knots]
    assert [share for _, share in curve.knots] == pytest.approx([share for _, share in CURVE.knots], abs=0.002)
    assert overhead == pytest.approx(OVERHEAD, rel=0.01)
    assert layers.predicted(curve, overhead) == pytest.approx(layers.seconds, rel=0.005)


def test_noise_in_the_table_stays_in_the_table():
    layers = fit_tables.layers_of(linear_rows(noise=0.05), "a100", load_hardware("a100-80"))
    curve, overhead = fit_tables.fit_layers(layers)
    clean = fit_tables.layers_of(linear_rows(), "a100", load_hardware("a100-80"))
    assert layers.predicted(curve, overhead) == pytest.approx(clean.seconds, rel=0.06)


def test_rows_of_other_gpus_and_models_are_left_out():
    rows = linear_rows()
    others = [row | {"gpu": "h100"} for row in rows] + [row | {"model": "phi-2"} for row in rows]
    layers = fit_tables.layers_of([*rows, *others], "a100", load_hardware("a100-80"))
    assert len(layers.groups) == len(layers.tokens) == len(rows)


def test_links_are_found_again():
    near = fit_tables.fit_link(fit_tables.link_rows(network_rows(), "a100_dgx", "all_reduce"))
    far = fit_tables.fit_link(fit_tables.link_rows(network_rows(), "a100_dgx", "send_recv"))
    for found, made in ((near, NEAR), (far, FAR)):
        assert (found.bandwidth, found.latency) == pytest.approx((made.bandwidth, made.latency), rel=1e-3)


def test_one_outlier_does_not_move_a_link():
    rows = network_rows() * 4
    rows[0] = rows[0] | {"median_ms": "50"}
    near = fit_tables.fit_link(fit_tables.link_rows(rows, "a100_dgx", "all_reduce"))
    assert (near.bandwidth, near.latency) == pytest.approx((NEAR.bandwidth, NEAR.latency), rel=0.05)


def test_the_least_squares_are_found_from_afar():
    def errors(x: np.ndarray) -> np.ndarray:
        return np.array([x[0] ** 2 - 2, x[0] * x[1] - 1])

    assert fit_tables.least_squares(errors, np.array([5.0, 5.0])) == pytest.approx([2**0.5, 0.5**0.5], abs=1e-6)


def write(path: Path, rows: list[dict[str, str]]) -> None:
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_the_script_prints_errors_predictions_and_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(fit_tables, "GPUS", {"a100": "a100-80"})
    monkeypatch.setattr("sys.argv", ["fit_tables", "--traces", str(tmp_path)])
    whole = {"model": "llama2-70b", "hardware": "a100-80gb", "tp": "2", "prompt_tokens": "512"}
    rows = [(1, 200.0), (2, 400.0), (4, 90.0)]  # four prompts faster than two: not a valid measurement
    splitwise = [whole | {"batch": str(n), "prompt_ms": str(ms), "token_ms": "55"} for n, ms in rows]
    write(tmp_path / "calib_vidur_linear.csv.gz", linear_rows())
    write(tmp_path / "calib_vidur_network.csv.gz", network_rows())
    write(tmp_path / "calib_splitwise_perf.csv.gz", splitwise)
    fit_tables.main()
    printed = capsys.readouterr().out
    assert "| Llama-2-70b-hf | 4 | 0.0 | 0.0 |" in printed
    assert "all-reduce: 170.0 GB/s, 40 µs; mean relative error 0 %" in printed
    assert "| 2 | 512 | 2 | 400 |" in printed
    assert "| 2 | 512 | 4 |" not in printed
    assert "token, tp 2: median error" in printed
    assert "layer: 3.0" in printed or "layer: 2.99" in printed
