"""The demo's verdict, page and screen."""

import io

from rich.console import Console

from bench.morph_parts import comparison
from bench.morph_parts.live import Screen
from bench.morph_parts.systems import ACCURACY, FULL, INT4, LABELS
from jaxserve.bench.prometheus import Scrape
from tests.bench.morph_results import INT4_LAYERS, INT8_LAYERS, decision, made_results, swap


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


def test_demo_verdict_states_the_figures():
    sentence = comparison.verdict(demo_results())
    assert "0.0% instead of 100.0%" in sentence
    assert "16.0 times shorter" in sentence
    worse = demo_results()
    worse["static"], worse["morph"] = worse["morph"], worse["static"]
    assert "16.0 times longer" in comparison.verdict(worse)


def test_demo_page_is_self_contained(tmp_path):
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


def test_screen_without_a_terminal_prints_every_change():
    output = io.StringIO()
    screen = Screen(Console(file=output, width=200), "a system", order=(1, 0), max_pages=20, slo_s=2)
    with screen.shown():
        for time_s, seen in enumerate((scrape(), scrape(2, 20, 4), scrape(0, 20, 4), scrape(0, 10, 4))):
            screen.look(time_s / 10, seen)
    lines = output.getvalue().splitlines()
    assert lines[0] == "a system"
    assert "2 layers to int4, KV 10 to 20 pages" in lines[2]
    assert "TTFT 0.25 s" in lines[2]
    assert lines[3].endswith("2 layers back to full precision")
    assert lines[4].endswith("KV 20 to 10 pages")


def test_screen_shows_each_precision():
    output = io.StringIO()
    screen = Screen(Console(file=output, width=200), "a system", order=(1, 0, 2), max_pages=20, slo_s=2)
    with screen.shown():
        for time_s, (int4, int8) in enumerate(((0, 0), (1, 2), (1, 1), (0, 0))):
            seen = scrape(int4)
            screen.look(time_s / 10, Scrape(seen.values | {INT8_LAYERS: int8}, {}))
    changes = [line.partition("<- ")[2] for line in output.getvalue().splitlines()[2:]]
    assert changes == [
        "1 layer to int4, 2 layers to int8",
        "1 layer back to full precision",
        "2 layers back to full precision",
    ]
    assert "layers 1 in int4, 2 in int8; " in output.getvalue()


def test_screen_draws_in_a_terminal():
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120)
    with Screen(console, "a system", order=(1, 0), max_pages=20, slo_s=2).shown() as screen:
        screen.look(0.0, scrape())
        screen.look(0.1, scrape(1, 20, 4))
    drawn = output.getvalue()
    assert "1 in int4" in drawn
    assert "4 of 20" in drawn
    assert "0.25 s (SLO 2 s)" in drawn
