import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from jaxserve.bench.report import write_report
from jaxserve.bench.report.figure import row_of_axes, scale_y
from jaxserve.bench.report.page import draw
from jaxserve.bench.report.plots import PLOTS
from jaxserve.bench.report.rates import throughput_against_rate
from jaxserve.bench.report.runs import PlottedRun, united
from jaxserve.bench.report.series import Requests
from jaxserve.core.errors import ConfigError
from tests.bench import simulated

SERVER_PLOTS = {"running-requests", "queue-length", "kv-usage", "layers-by-precision"}
CLIENT_PLOTS = {"ttft-over-time", "tpot-over-time", "latency-cdf", "arrivals-and-completions", "requests-in-flight"}


def run(name: str = "a", **more: Any) -> PlottedRun:
    result = simulated.result(label=name, **{"n": 40, **more})
    return PlottedRun(name, result, Requests.of(result))


def figure(name: str, *runs: PlottedRun) -> Figure:
    drawn = PLOTS[name](runs)
    assert drawn is not None
    return drawn


class Page(HTMLParser):
    """The tags and text of a page, and what it would fetch."""

    def __init__(self, text: str):
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "data", "srcset")]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def report_of_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([simulated.result(n=40, label="one")], tmp_path_factory.mktemp("one") / "report.html")


def test_report_page_is_self_contained_with_every_plot(report_of_one: Path):
    text = report_of_one.read_text()
    page = Page(text)
    images = list((report_of_one.parent / "report-plots").glob("*.png"))
    assert {image.stem for image in images} == SERVER_PLOTS | CLIENT_PLOTS
    assert all(image.read_bytes().startswith(b"\x89PNG") for image in images)
    assert len(page.fetched) == len(images)
    assert all(source.startswith("data:image/png;base64,") for source in page.fetched)
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert "url(" not in text
    assert "@import" not in text
    assert 'name="viewport"' in text


def test_report_begins_with_its_figures_and_numbers(report_of_one: Path):
    result = simulated.result(n=40, label="one")
    text = report_of_one.read_text()
    headline = Page(text[text.index("<dl") : text.index("</dl>")]).text.split("\n")
    assert f"output tokens per second{result['output_throughput']:,.1f}" in headline
    assert f"P99 TTFT{result['p99_ttft_ms']:,.0f} ms" in headline
    assert text.index("<dl") < text.index("<h2>Numbers") < text.index("<h2>Plots") < text.index("<h2>How it was")


def test_equal_series_are_drawn_once_under_all_names():
    runs = [run("a"), run("b"), run("c", seed=4)]
    drawn = united(runs, lambda run: (run.requests.e2el_s,))
    assert [(index, run.name) for index, run in drawn] == [(0, "a and b"), (2, "c")]
    for name in ("requests-in-flight", "queue-length", "ttft-over-time", "latency-cdf", "kv-usage"):
        axes = figure(name, *runs).axes[0]
        labels = axes.get_legend_handles_labels()[1]
        assert (
            sum(label.startswith("a and b") for label in labels) == sum(label.startswith("c") for label in labels) > 0
        )
        assert not any(label.startswith("b") for label in labels)


def test_gauges_that_never_change_are_one_line_whenever_they_were_observed():
    runs = [run("a"), run("b", seed=4)]
    for each in runs:
        each.result["server"]["num_requests_waiting"] = [0] * len(each.result["server"]["t"])
    axes = figure("queue-length", *runs).axes[0]
    assert axes.get_legend_handles_labels()[1] == ["a and b"]


def test_report_page_shows_numbers_environment_and_command(report_of_one: Path):
    result = simulated.result(n=40, label="one")
    text = Page(report_of_one.read_text()).text
    assert "Median TTFT (ms)" in text
    assert f"{result['median_ttft_ms']:.2f}" in text
    assert "some CPU" in text
    assert "jaxserve bench serve --request-rate 5.0" in text
    assert "uniform:64,900" in text


def test_a_result_without_server_series_still_makes_a_page(tmp_path: Path):
    write_report([simulated.result(n=40, with_server=False)], tmp_path / "report.html")
    assert {image.stem for image in (tmp_path / "report-plots").glob("*.png")} == CLIENT_PLOTS


def test_results_overlay_each_with_its_name(tmp_path: Path):
    results = [simulated.result(n=40, label="first"), simulated.result(n=40, label="second", slower=1.5)]
    assert "second" in Page(write_report(results, tmp_path / "report.html").read_text()).text
    lines = figure("queue-length", run("first"), run("second", slower=1.5)).axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["first", "second"]


def test_equal_labels_get_distinct_names(tmp_path: Path):
    results = [simulated.result(rate, n=30, label="x") for rate in (2.0, 3.0, 3.0)]
    text = Page(write_report(results, tmp_path / "report.html").read_text()).text
    for name in ("x, 2 req/s", "x, 3 req/s #1", "x, 3 req/s #2"):
        assert name in text


def test_plots_of_an_earlier_report_are_replaced(tmp_path: Path):
    path = tmp_path / "report.html"
    write_report([simulated.result(n=40)], path)
    write_report([simulated.result(n=40, with_server=False)], path)
    assert {image.stem for image in (tmp_path / "report-plots").glob("*.png")} == CLIENT_PLOTS


def test_offline_rows_become_a_table_without_plots(tmp_path: Path):
    result = {"kind": "latency", "label": "mine", "rows": [{"batch": 8, "step_ms": 1.25}], "environment": {}}
    page = Page(write_report([result], tmp_path / "report.html").read_text())
    assert page.fetched == []
    assert "step_ms" in page.text
    assert "1.25" in page.text


def test_text_from_a_result_is_escaped(tmp_path: Path):
    result = simulated.result(n=30, label="<script>alert(1)</script>")
    page = Page(write_report([result], tmp_path / "report.html").read_text())
    assert "script" not in page.tags
    assert "<script>alert(1)</script>" in page.text


def test_report_without_results_or_folder_raises(tmp_path: Path):
    with pytest.raises(ConfigError, match="needs a result"):
        write_report([], tmp_path / "report.html")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write .*report-plots"):
        write_report([simulated.result(n=10)], tmp_path / "file" / "report.html")


@pytest.mark.parametrize("how", ["all fail", "all at once", "one request", "one token each"])
def test_report_of_unusual_results_is_written(tmp_path: Path, how: str):
    records, series = simulated.simulate(5.0, n=1 if how == "one request" else 20)
    for record in records:
        if how == "all at once":
            record.due_s = record.arrival_s = 0.0
        if how == "one token each":
            record.chunk_times_s, record.output_tokens = record.chunk_times_s[:1], 1
            record.end_s = record.chunk_times_s[0]
    result = simulated.result_of(records, series)
    if how == "all fail":
        result["errors"] = ["HTTP 500"] * 20
    assert write_report([result], tmp_path / "report.html").exists()
    assert (tmp_path / "report-plots" / "requests-in-flight.png").exists()


# -- what single plots show


def test_capacity_and_plan_are_drawn_where_they_change():
    swapped = run(rate=10.0, n=200, slots=128, swap_at=5.0)
    axes = figure("kv-usage", swapped).axes[0]
    capacity = next(line for line in axes.get_lines() if line.get_label() == "capacity")
    assert set(capacity.get_ydata()) == {simulated.PAGES, 2 * simulated.PAGES}
    assert [text.get_text() for text in axes.texts] == ["plan 2"]
    assert not figure("kv-usage", run()).axes[0].texts


def test_layers_plot_stacks_every_precision():
    axes = figure("layers-by-precision", run(rate=10.0, n=200, swap_at=5.0)).axes[0]
    assert axes.get_legend_handles_labels()[1] == ["bfloat16", "int8"]
    assert axes.get_ylim()[1] >= 16


def test_kv_plot_without_pages_shows_the_share_of_the_cache():
    told = run()
    told.result["server"] = {"t": [0.0, 1.0], "kv_cache_usage_perc": [0.25, 0.5]}
    (line,) = figure("kv-usage", told).axes[0].get_lines()
    assert list(line.get_ydata()) == [25, 50]


def test_objectives_are_marked_in_the_cdf():
    measured = run()
    objective = round(measured.result["max_ttft_ms"])
    measured.result["slo"] = {"ttft": objective, "e2el": 1e6}
    ttft, _, e2el = figure("latency-cdf", measured).axes
    assert [text.get_text() for text in ttft.texts] == ["SLO"]
    assert ttft.get_lines()[-1].get_xdata()[0] == objective  # ms
    assert len(e2el.get_lines()) == 1  # far beyond all requests


def test_failures_are_drawn_apart_from_completions():
    records, _ = simulated.simulate(5.0, n=40)
    simulated.fail(records[10:15], "HTTP 503")
    result = simulated.result_of(records)
    axes = figure("arrivals-and-completions", PlottedRun("a", result, Requests.of(result))).axes[0]
    totals = {}
    for patch in axes.patches:
        values, edges, _ = patch.get_data()
        totals[patch.get_label()] = round(float(np.sum(values * np.diff(edges))))
    assert totals == {"arrivals": 40, "completions": 35, "failures": 5}


def test_throughput_against_rate_needs_three_rates():
    results = [(f"{rate}", simulated.result(rate, n=120, label=f"{rate}")) for rate in (2.0, 6.0, 20.0)]
    assert throughput_against_rate(results[:2]) is None
    drawn = throughput_against_rate(results)
    assert drawn is not None
    names = drawn.axes[0].get_legend_handles_labels()[1]
    assert any(re.fullmatch(r"saturates at [\d.]+ req/s", name) for name in names)


def test_every_configuration_of_a_sweep_has_its_own_curve():
    results = [
        (name, simulated.result(rate, n=60, label=name, slower=slower))
        for name, slower in (("fast", 1.0), ("slow", 2.0))
        for rate in (1.0, 2.0, 3.0)
    ]
    drawn = throughput_against_rate(results)
    assert drawn is not None
    names = drawn.axes[0].get_legend_handles_labels()[1]
    assert {"fast", "slow"} <= set(names)


def test_caption_depends_on_the_number_of_results(tmp_path: Path):
    for count, told in ((1, "Dots are requests"), (4, "Medians within intervals")):
        results = [simulated.result(label=f"run {number}", n=20, seed=number) for number in range(count)]
        page = Page(write_report(results, tmp_path / "report.html").read_text())
        assert ("Dots are requests" in page.text) == (count == 1)
        assert told in page.text


def test_run_with_a_single_point_is_visible():
    moment = run("short")
    at_once = replace(moment.requests, arrival_s=np.zeros_like(moment.requests.arrival_s))
    (median, _) = figure("ttft-over-time", replace(moment, requests=at_once)).axes[0].get_lines()
    assert len(median.get_xdata()) == 1
    assert median.get_marker() == "o"


def test_a_logarithmic_axis_has_plain_numbers():
    drawn, (axes,) = row_of_axes("title", 1)
    axes.plot([1, 2], [30, 110])
    scale_y(axes, log=True)
    drawn.draw_without_rendering()
    texts = [label.get_text() for label in axes.get_yticklabels(which="both") if label.get_text()]
    assert "100" in texts
    assert len(texts) > 2
    assert all(text.replace(",", "").isdecimal() for text in texts), texts


def test_many_results_stay_readable():
    runs = [run(f"run {number}", n=10, seed=number) for number in range(12)]
    assert len(draw(runs)) == len(CLIENT_PLOTS | SERVER_PLOTS)
    assert len(figure("ttft-over-time", *runs[:8]).axes[0].get_lines()) == 8


def test_pyplot_is_never_loaded():
    code = "import sys, jaxserve.bench.report; sys.exit('matplotlib.pyplot' in sys.modules or 'jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_page_of_a_simulated_run_says_so_at_the_top(tmp_path: Path):
    result = simulated.result(n=10, label="one") | {"simulated": True, "hardware": "h100"}
    page = Page(write_report([result], tmp_path / "report.html").read_text())
    assert "one: simulated on h100: predicted, not measured" in page.text
    assert "bench serve" not in page.text.split("Numbers")[0]
