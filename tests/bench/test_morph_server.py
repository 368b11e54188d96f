"""The adaptation measurement and the demo with real servers."""

import json
import sys
from contextlib import nullcontext

import numpy as np
import pytest

from bench import demo, morph
from bench.morph_parts.measure import run, started
from bench.morph_parts.quality import adaptation_figures, profile_of
from bench.morph_parts.steady import FEWER, MORE, measure_plan_changes
from bench.morph_parts.systems import FULL, PERFORMANCE, Setup, envelope, systems
from bench.morph_parts.traffic import Prompts, workload
from jaxserve.bench.traces.trace import Trace
from jaxserve.core.bundled import bundled_model_path
from tests.support.thorough import THOROUGH


def test_a_server_under_load_changes_layers_and_changes_them_back():
    # Three requests fit into the pages of full precision, and 60 come at once.
    setup = Setup(
        bundled_model_path(), kv_pages=56, max_model_len=448, max_num_seqs=16, prefill_tokens=64, slo_ttft=0.5
    )
    room = envelope(setup)
    known = systems(setup, room)
    trace = Trace.of("t", [0.0] * 60, [64] * 60, [200] * 60)
    load = workload(trace, Prompts(range(300, 1300), "numbers"), np.random.default_rng(0))
    seen = []
    result = run(known[PERFORMANCE], setup, load, command=["test"], progress=lambda time_s, scrape: seen.append(time_s))
    figures = adaptation_figures(result, profile_of(setup.model))
    assert (result["completed"], result["failed"]) == (60, 0)
    assert figures["adaptation"]["most_swapped_layers"] > 0
    freed = (room.full_layers_bytes - room.quantized_layers_bytes) // room.page_bytes
    assert 0 < figures["adaptation"]["peak_kv_pages"] - known[PERFORMANCE].kv_pages <= freed + 1
    assert figures["adaptation"]["swapped_in_profile_order"]
    assert figures["adaptation"]["transitions"].keys() == {"done"}
    assert result["restored_after_s"] is not None
    assert result["decisions"][-1]["outcome"] == "done"
    assert len(seen) > 5
    json.dumps(result | figures, allow_nan=False)


def test_all_layers_change_to_and_fro_beside_a_steady_decode():
    setup = Setup(bundled_model_path(), kv_pages=56, max_model_len=448, max_num_seqs=4, prefill_tokens=64)
    found = measure_plan_changes(setup, seconds=10, tokens=390)
    assert {exchange.after for exchange in found} == {"int4", "bfloat16", MORE, FEWER}
    assert all(exchange.seconds > 0 and exchange.step_during_s > 0 for exchange in found)


def test_the_demo_writes_the_three_results_and_a_page(tmp_path, monkeypatch):
    """Beside one server in full precision in place of three, for a second each."""
    monkeypatch.setattr(demo, "PHASES", ((0.3, demo.CALM), (0.5, demo.PEAK), (0.2, demo.CALM)))
    monkeypatch.setattr(demo, "AT_ONCE", 4)
    # Of so few requests all tokens may reach a client that had to wait in the same moment: a thousand times the rate.
    measured = demo._capacity
    monkeypatch.setattr(demo, "_capacity", lambda *arguments: min(measured(*arguments), 1000.0))
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(tmp_path)])
    with started(systems(demo.SETUP, envelope(demo.SETUP))[FULL]) as url:
        monkeypatch.setattr(demo, "started", lambda system: nullcontext(url))
        assert demo.main() == 0
    found = json.loads((tmp_path / "result.json").read_text())
    assert found.keys() == {"static", "int4", "morph"}
    for result in found.values():
        assert result["completed"] > 0
        assert result["failed"] == 0
        assert result["cross_entropy"] == result["cross_entropy_full"] > 0
        assert result["restored_after_s"] == 0
        assert {"output_throughput", "p95_ttft_ms", "median_tpot_ms", "slo_violation_rate"} <= result.keys()
    assert "<table" in (tmp_path / "report.html").read_text()


@pytest.mark.skipif(not THOROUGH, reason="make test-thorough runs it: it compiles two engines")
def test_a_sweep_of_a_model_without_a_checkpoint_writes_figures_and_a_check_at_light_load(tmp_path, monkeypatch):
    words = ["rates", "--models", "tiny", "--systems", "full,morph-performance", "--rates", "1.5", "--seconds", "0.5"]
    monkeypatch.setattr(sys, "argv", ["morph", *words, "--out", str(tmp_path), "--cache-dir", str(tmp_path / "cache")])
    assert morph.main() == 0
    found = json.loads((tmp_path / "tiny" / "rates" / "rates.json").read_text())
    assert [(row["multiple"], row["system"]) for row in found["rows"]] == [
        (multiple, system) for multiple in (0.3, 1.5) for system in (FULL, PERFORMANCE)
    ]
    assert all(row["requests"] > 1 and row["failed"] == 0 for row in found["rows"])
    # A light load may hold pages for too short a time to be seen.
    assert all(0 <= row["kv_used_max"] <= 1 and row["queue_mean_ms"] >= 0 for row in found["rows"])
    assert all(row["kv_used_max"] > 0 for row in found["rows"] if row["multiple"] > 1)
    assert [check["system"] for check in found["light_load"]] == [PERFORMANCE]
    assert found["light_load"][0]["answers"] == found["rows"][0]["requests"]
    assert found["quantised_by"] == "layers rounded to the nearest"
