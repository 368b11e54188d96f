"""The measurement of adaptation: its traffic, what it reads off results, its tables, plots and the demo's screen."""

import io
import json
import sys
from contextlib import nullcontext

import numpy as np
import pytest
from rich.console import Console

from bench import demo
from bench.morph_parts import comparison, plots
from bench.morph_parts.live import Screen
from bench.morph_parts.measure import Watch, run, started
from bench.morph_parts.quality import describe, in_order, profile_of
from bench.morph_parts.steady import Exchange, exchange_table, exchanges
from bench.morph_parts.summary import LIGHT, SATURATION, cells, verdict_table, verdicts, workload_tables
from bench.morph_parts.systems import ACCURACY, FULL, INT4, LABELS, NAMES, PERFORMANCE, Setup, envelope, systems
from bench.morph_parts.timeline import (
    Timeline,
    Tokens,
    saturated_throughput,
    step_ratios,
    tokens_by_swapped,
    transitions,
)
from bench.morph_parts.traffic import Lengths, Prompts, at_once, peak_demand, with_lengths, with_peak, workload
from jaxserve.bench.prometheus import Scrape
from jaxserve.bench.traces.synthetic import synthetic
from jaxserve.bench.traces.trace import Trace
from jaxserve.bundled import bundled_model_path

LENGTHS = Lengths(prompt=96, answer=160, longest_prompt=160, longest_answer=280)
INT4_LAYERS = 'layers_by_precision{precision="int4"}'
SWAPS = 'transitions_total{kind="SwapPrecision",outcome="done"}'


def burst() -> Trace:
    return synthetic("azure-burst", 72, None, np.random.default_rng(0))


# -- traffic


def test_lengths_have_the_wanted_means_and_limits():
    trace = with_lengths(burst(), LENGTHS)
    assert trace.input_tokens.mean() == pytest.approx(96, abs=1)
    assert trace.output_tokens.mean() == pytest.approx(160, abs=1)
    assert (trace.input_tokens.max(), trace.output_tokens.max()) == (160, 280)
    assert trace.history[-1]["factor_output"] > 0


def test_requests_that_had_failed_are_left_out():
    trace = with_lengths(Trace.of("t", [0, 1, 2], [10, 20, 30], [5, 0, 7]), LENGTHS)
    assert trace.arrival_s.tolist() == [0, 2]
    assert trace.history[-1]["failed_left_out"] == 1


@pytest.mark.parametrize("tokens_per_s", [500, 6000])
def test_the_peak_asks_for_what_is_wanted_and_time_stays(tokens_per_s):
    trace = with_lengths(burst(), LENGTHS)
    scaled = with_peak(trace, tokens_per_s, np.random.default_rng(1))
    assert peak_demand(scaled) == pytest.approx(tokens_per_s, rel=0.1)
    assert scaled.history[-1]["tokens_per_s"] == peak_demand(scaled)
    assert scaled.duration_s == pytest.approx(trace.duration_s, abs=3)


def test_the_peak_of_a_short_trace_counts_all_of_it():
    assert peak_demand(Trace.of("t", [0.5, 2.5], [1, 1], [40, 60])) == 10


def test_a_workload_has_the_traces_lengths_and_pieces_of_the_text():
    trace = at_once(with_lengths(burst(), LENGTHS), 5, np.random.default_rng(0))
    made = workload(trace, Prompts(range(1000), "numbers"), np.random.default_rng(0))
    assert len(made.requests) == 5
    for request, length in zip(made.requests, trace.input_tokens, strict=True):
        first = request.sample.prompt[0]
        assert request.sample.prompt == tuple(range(first, first + length))
        assert request.arrival_s == 0
    assert made.description["prompts"] == "numbers"


# -- systems


def test_every_system_fills_the_same_budget():
    setup = Setup(bundled_model_path(), kv_pages=56, max_model_len=448, max_num_seqs=8)
    room = envelope(setup)
    known = systems(setup, room)
    budget = room.full_layers + 56 * room.page
    taken = {
        FULL: room.full_layers,
        INT4: room.quantised_layers,
        ACCURACY: room.full_layers + room.exchange,
        PERFORMANCE: room.full_layers + room.exchange,
    }
    for name, layers in taken.items():
        left = budget - layers - known[name].kv_pages * room.page
        assert 0 <= left < room.page, name
    reserved = {system.serve_args[system.serve_args.index("--max-kv-pages") + 1] for system in known.values()}
    assert reserved == {str(known[INT4].kv_pages)}


# -- what results say


def made_result(**changes):
    """Two requests of four tokens each; layers are swapped from second 1 to 2, and back between 3 and 3.5."""
    result = {
        "label": "a system",
        "system": ACCURACY,
        "traffic": "burst",
        "round": 0,
        "slo": {"ttft": 2000.0},
        "num_prompts": 2,
        "arrival_times": [0.0, 2.0],
        "start_times": [0.0, 2.0],
        "ttfts": [0.5, 0.5],
        "itls": [[0.1, 0.1, 0.1], [0.1, 0.1, 0.1]],
        "latencies": [0.8, 0.8],
        "output_lens": [4, 4],
        "errors": ["", ""],
        "restored_after_s": 0.7,
        "decisions": [],
        "server": {
            "t": [0.0, 1.0, 2.0, 3.0, 3.5],
            INT4_LAYERS: [None, None, 2.0, 2.0, 0.0],
            "kv_pages_total": [10, 10, 20, 20, 10],
            "kv_pages_used": [0, 9, 19, 5, 0],
            "num_requests_waiting": [0, 5, 2, 0, 0],
            SWAPS: [None, None, 2.0, 2.0, 4.0],
        },
    }
    return result | changes


def test_tokens_come_when_the_client_had_them():
    tokens = Tokens.of(made_result())
    assert tokens.time_s.tolist() == pytest.approx([0.5, 0.6, 0.7, 0.8, 2.5, 2.6, 2.7, 2.8])
    assert np.isnan(tokens.gap_s[[0, 4]]).all()
    assert tokens.weight.tolist() == [1] * 8


def test_tokens_of_one_chunk_share_its_time():
    tokens = Tokens.of(made_result(itls=[[0.1], []], output_lens=[4, 3]))
    assert tokens.weight.tolist() == [2, 2, 3]


def test_a_token_near_a_change_counts_for_the_worse_mixture():
    timeline = Timeline.of(made_result(), "int4")
    assert timeline.swapped_at(np.array([0.5, 1.5, 2.5, 3.2, 9.0])).tolist() == [0, 2, 2, 2, 0]
    assert tokens_by_swapped(made_result(), "int4") == {0: 4, 2: 4}


def test_swaps_are_found_and_counted():
    result = made_result()
    assert list(Timeline.of(result, "int4").swap_spans()) == [(1.0, 2.0), (3.0, 3.5)]
    assert transitions(result) == {"done": 4}


def test_gaps_during_swaps_are_compared_with_those_before():
    gaps = [0.02] * 50 + [0.03] * 30  # from second 0 on: the swap is between 1 and 2
    result = made_result(start_times=[0.0], ttfts=[0.0], itls=[gaps], output_lens=[81], errors=[""])
    assert step_ratios(result, "int4") == [pytest.approx(1.5)]


def test_too_few_gaps_say_nothing():
    assert step_ratios(made_result(), "int4") == []


def test_tokens_that_came_together_say_nothing_of_steps():
    gaps = [0.0, 0.0, 0.06] * 16 + [0.03] * 30
    result = made_result(start_times=[0.0], ttfts=[0.0], itls=[gaps], output_lens=[79], errors=[""])
    assert step_ratios(result, "int4") == []


def test_saturated_throughput_leaves_out_start_and_end():
    result = made_result(start_times=[0.0], ttfts=[5.0], itls=[[0.1] * 89 + [3.0] * 10], output_lens=[100], errors=[""])
    assert saturated_throughput(result) == pytest.approx(10, rel=0.05)


def test_quality_is_weighted_by_the_tokens_of_each_mixture():
    profile = profile_of(bundled_model_path())
    told = describe(made_result(), profile)
    losses = profile.curves["int4"]["lis"][0].cross_entropy
    assert told["cross_entropy"] == pytest.approx((losses[0] + losses[2]) / 2)
    assert told["cross_entropy_full"] == losses[0]
    assert told["adaptation"]["peak_kv_pages"] == 20
    assert told["adaptation"]["most_swapped_layers"] == 2


def test_a_model_without_a_profile_has_no_cross_entropy(tmp_path):
    assert profile_of(tmp_path) is None
    assert describe(made_result(), None)["cross_entropy"] is None


def decision(*lines, outcome="done"):
    return {"outcome": outcome, "transitions": list(lines)}


def swap(layer, after):
    return f"instance 0: layers.{layer} bfloat16 -> {after} (frees 0.9 MB, about 1 ms)"


def test_the_number_of_layers_says_which_if_all_decisions_keep_the_order():
    entry = decision(swap(1, "int4"), swap(3, "int4"), "instance 0: KV 54 -> 80 pages (needs 1.7 MB)")
    assert in_order([entry, decision(swap(1, "bfloat16"))], (3, 1, 0, 2))
    assert not in_order([entry, decision(swap(3, "bfloat16"))], (3, 1, 0, 2))
    assert not in_order([decision(swap(3, "int4"), outcome="failed: layers.3")], (3, 1, 0, 2))


def test_restored_means_as_at_the_start_until_the_end():
    watch = Watch()
    for time_s, layers, pages in ((0, 0, 10), (1, 2, 10), (2, 2, 20), (3, 0, 20), (4, 0, 10), (5, 0, 10)):
        watch.look(time_s, Scrape({INT4_LAYERS: layers, "kv_pages_total": pages, "plan_version": time_s}, {}))
        assert watch.settled_since == {0: 0, 4: 4, 5: 4}.get(time_s)


# -- tables and plots


def made_results():
    """All systems under all kinds of traffic: full precision is slow in the burst, nobody is else."""
    profile = profile_of(bundled_model_path())
    results = []
    for traffic in (SATURATION, LIGHT, "burst"):
        for name in NAMES:
            slow = traffic == "burst" and name == FULL
            result = made_result(system=name, label=LABELS[name], traffic=traffic, ttfts=[8.0 if slow else 0.5] * 2)
            if name in (FULL, INT4) or traffic == LIGHT:
                still = {INT4_LAYERS: [8.0 if name == INT4 else 0.0] * 5, "kv_pages_total": [12] * 5}
                result["server"] = {key: value for key, value in result["server"].items() if key != SWAPS} | still
            results.append(result | describe(result, profile))
    return results


def test_tables_name_every_system_under_every_workload():
    tables = workload_tables(cells(made_results()))
    for name in NAMES:
        assert tables.count(f"| {LABELS[name]} |") == 3
    assert "100.0%" in tables
    assert "(1.67x)" in tables  # 20 pages of 12


def test_targets_are_judged_by_what_was_measured():
    judged = {verdict.target: verdict for verdict in verdicts(cells(made_results()))}
    met = {target: verdict.met for target, verdict in judged.items()}
    assert met["morph, accuracy: SLO violations at least 92 % lower, all traces together"] is True
    assert met["morph, accuracy: P95 TTFT at least 3.9x better, in every trace"] is True
    assert met["morph, accuracy: throughput at saturation at least 1.6x"] is False
    assert met["morph, accuracy: restored within 10 s of the end, every time"] is True
    assert met["morph, performance: nothing happens under light load"] is True
    assert "burst 16.00x" in judged["morph, performance: P95 TTFT at least 10x better, in every trace"].measured
    assert "**missed**" in verdict_table(list(judged.values()))


@pytest.mark.parametrize(("share", "met"), [(0.93, (True, True)), (0.925, (False, True)), (0.92, (False, False))])
def test_agreement_is_judged_beside_that_of_full_precision_with_itself(share, met):
    shares = {FULL: 0.95, INT4: 0.90, ACCURACY: share, PERFORMANCE: 0.90}
    results = [result | {"agreement": {"share": shares[result["system"]]}} for result in made_results()]
    judged = {verdict.target: verdict.met for verdict in verdicts(cells(results))}
    what = "(agreement with full precision), in every trace"
    found = (judged[f"morph, accuracy: loses at most {limit} {what}"] for limit in ("2.2 %", "half of static int4"))
    assert tuple(found) == met


def test_exchanges_are_told_by_direction():
    to_int4 = [Exchange("int4", 0.2, 0.010, 0.011), Exchange("int4", 0.3, 0.010, 0.013)]
    table = exchange_table([*to_int4, Exchange("full", 0.1, 0.01, 0.01)])
    assert "| int4 | 2 | 250 | 10.00 | 1.20x | 1.30x |" in table
    assert "| full | 1 | 100 | 10.00 | 1.00x | 1.00x |" in table


def test_never_restored_is_a_miss():
    results = [result | {"restored_after_s": None} for result in made_results()]
    judged = {verdict.target: verdict.met for verdict in verdicts(cells(results))}
    assert judged["morph, accuracy: restored within 10 s of the end, every time"] is False


def test_without_results_nothing_is_met():
    assert {verdict.met for verdict in verdicts({})} == {None}


def test_plots_are_png_files():
    chosen = [result for result in made_results() if result["traffic"] == "burst"]
    assert plots.draw(chosen, "a burst").startswith(b"\x89PNG")


# -- the demo


def demo_results():
    keys = {FULL: "static", INT4: "int4", ACCURACY: "morph"}
    facts = {"slo_violation_rate": 0.0, "median_tpot_ms": 2.0, "environment": {"cores": "2"}, "command": "demo"}
    found = {}
    for result in made_results():
        if result["traffic"] == "burst" and result["system"] in keys:
            ttft = result["ttfts"][0] * 1e3
            latencies = {f"{name}_ttft_ms": ttft for name in ("median", "p95", "p99")}
            found[keys[result["system"]]] = result | facts | latencies
    found["static"]["slo_violation_rate"] = 1.0
    found["morph"]["decisions"] = [{"time": 1.5, "reason": "queue < 1", **decision(swap(3, "int4"))}]
    return found


def test_the_verdict_says_what_came_of_it():
    told = comparison.verdict(demo_results())
    assert "0.0% instead of 100.0%" in told
    assert "16.0 times shorter" in told
    worse = demo_results()
    worse["static"], worse["morph"] = worse["morph"], worse["static"]
    assert "16.0 times longer" in comparison.verdict(worse)


def test_the_page_holds_all_it_shows(tmp_path):
    page = comparison.write_page(demo_results(), tmp_path / "demo" / "report.html").read_text()
    assert "queue &lt; 1" in page
    assert "data:image/png;base64," in page
    assert "http" not in page.replace("http-equiv", "")
    for label in (FULL, INT4, ACCURACY):
        assert f"<th>{LABELS[label]}</th>" in page


def scrape(swapped=0, pages=10, tokens=0):
    values = {"kv_pages_total": pages, "kv_pages_used": 4, "num_requests_waiting": 3, INT4_LAYERS: swapped}
    first = {"time_to_first_token_seconds_sum": 0.25 * tokens, "time_to_first_token_seconds_count": tokens}
    return Scrape(values | first, {})


def test_the_screen_tells_every_change_where_there_is_no_terminal():
    output = io.StringIO()
    screen = Screen(Console(file=output, width=200), "a system", order=(1, 0), most_pages=20, slo_s=2)
    with screen.shown():
        for time_s, seen in enumerate((scrape(), scrape(2, 20, 4), scrape(0, 20, 4), scrape(0, 10, 4))):
            screen.look(time_s / 10, seen)
    lines = output.getvalue().splitlines()
    assert lines[0] == "a system"
    assert "2 layers to int4, KV 10 to 20 pages" in lines[2]
    assert "TTFT 0.25 s" in lines[2]
    assert lines[3].endswith("2 layers back to full precision")
    assert lines[4].endswith("KV 20 to 10 pages")


def test_the_screen_draws_in_a_terminal():
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120)
    with Screen(console, "a system", order=(1, 0), most_pages=20, slo_s=2).shown() as screen:
        screen.look(0.0, scrape())
        screen.look(0.1, scrape(1, 20, 4))
    drawn = output.getvalue()
    assert "1 of 2 in int4" in drawn
    assert "4 of 20" in drawn
    assert "0.25 s (SLO 2 s)" in drawn


# -- a real server


def test_a_server_under_load_changes_layers_and_changes_them_back():
    setup = Setup(bundled_model_path(), kv_pages=56, max_model_len=448, max_num_seqs=4, prefill_tokens=64)
    room = envelope(setup)
    known = systems(setup, room)
    trace = Trace.of("t", [0.0] * 12, [64] * 12, [200] * 12)
    load = workload(trace, Prompts(range(300, 1300), "numbers"), np.random.default_rng(0))
    seen = []
    result = run(known[PERFORMANCE], setup, load, command=["test"], progress=lambda time_s, scrape: seen.append(time_s))
    told = describe(result, profile_of(setup.model))
    assert (result["completed"], result["failed"]) == (12, 0)
    assert told["adaptation"]["most_swapped_layers"] > 0
    freed = (room.full_layers - room.quantised_layers) // room.page
    assert 0 < told["adaptation"]["peak_kv_pages"] - known[PERFORMANCE].kv_pages <= freed + 1
    assert told["adaptation"]["swapped_in_profile_order"]
    assert told["adaptation"]["transitions"].keys() == {"done"}
    assert result["restored_after_s"] is not None
    assert result["decisions"][-1]["outcome"] == "done"
    assert len(seen) > 5
    json.dumps(result | told, allow_nan=False)


def test_all_layers_change_to_and_fro_beside_a_steady_decode():
    setup = Setup(bundled_model_path(), kv_pages=56, max_model_len=448, max_num_seqs=4, prefill_tokens=64)
    found = exchanges(setup, seconds=10, tokens=390)
    assert {exchange.after for exchange in found} == {"int4", "bfloat16"}
    assert all(exchange.seconds > 0 and exchange.step_during_s > 0 for exchange in found)


def test_the_demo_writes_the_three_results_and_a_page(tmp_path, monkeypatch):
    """Beside one server in full precision in place of three, for a second each."""
    monkeypatch.setattr(demo, "PHASES", ((0.3, demo.CALM), (0.5, demo.PEAK), (0.2, demo.CALM)))
    monkeypatch.setattr(demo, "AT_ONCE", 4)
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
