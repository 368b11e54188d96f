import io

from rich.console import Console

from jaxserve.bench.table import print_result, print_rows, remarks, sections
from tests.bench import simulated


def printed(result, *, terminal: bool = False, **more) -> str:
    file = io.StringIO()
    print_result(result, console=Console(file=file, force_terminal=terminal, width=80), **more)
    return file.getvalue()


def test_plain_text_has_one_value_per_line_under_the_names_that_scripts_look_for():
    text = printed({"kind": "serve", "completed": 3, "duration": 2.5, "mean_ttft_ms": 12.345, "p99_ttft_ms": 20.0})
    lines = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    assert lines["Successful requests"] == "3"
    assert lines["Benchmark duration (s)"] == "2.50"
    assert lines["Mean TTFT (ms)"] == "12.35"
    assert lines["P99 TTFT (ms)"] == "20.00"
    assert "\x1b" not in text


def test_result_in_a_terminal_shows_the_same_numbers():
    result = simulated.result(5.0, n=20)
    plain = [line.split()[-1] for line in printed(result).splitlines() if ":" in line]
    assert plain
    for number in plain:
        assert number in printed(result, terminal=True)


def test_metrics_and_percentiles_are_chosen():
    result = {
        "median_ttft_ms": 1.0,
        "median_e2el_ms": 2.0,
        "p50_ttft_ms": 3.0,
        "p99.9_ttft_ms": 4.0,
        "p99_ttft_ms": 5.0,
    }
    (_, latency) = sections(result, ["ttft"], [50, 99.9])
    assert latency.lines == (("Median TTFT (ms)", "1.00"), ("P50 TTFT (ms)", "3.00"), ("P99.9 TTFT (ms)", "4.00"))


def test_table_leaves_out_missing_figures():
    (totals,) = sections({"completed": 0, "failed": 2, "request_rate": "inf", "goodput": None, "mean_ttft_ms": None})
    assert totals.lines == (("Successful requests", "0"), ("Failed requests", "2"))


def test_failures_are_listed_by_frequency():
    assert remarks({"errors": ["", "timeout", "HTTP 503", "HTTP 503"]}) == ["2 failed: HTTP 503", "1 failed: timeout"]


def test_interrupted_run_and_saturated_client_are_remarked():
    client = {"saturated": True, "warning": "the client fell behind: 7 of 10 requests sent late"}
    text = printed({"interrupted": True, "unfinished": 3, "client": client})
    assert "interrupted: 3 unfinished requests are not counted" in text
    assert "7 of 10 requests sent late" in text
    assert remarks({"interrupted": False, "client": {"saturated": False, "warning": None}}) == []


def test_rows_are_printed_as_they_are_and_never_cut():
    file = io.StringIO()
    rows = [{"batch": 1, "step, ms": 1.234}, {"batch": 32, "step, ms": 0.01234, "note": "x" * 200}]
    print_rows(rows, Console(file=file, width=40))
    head, first, second = file.getvalue().splitlines()
    assert head.split() == ["batch", "step,", "ms", "note"]
    assert first.split() == ["1", "1.23", "-"]
    assert second.split() == ["32", "0.0123", "x" * 200]


def test_brackets_in_a_result_are_text_and_no_markup():
    assert "[red]reason" in printed({"errors": ["[red]reason"]})
    assert "[bold]" in printed({"kind": "latency", "rows": [{"[bold]": 1}]}, terminal=True)


def test_an_offline_measurement_that_was_interrupted_before_its_first_row_says_only_that():
    text = printed({"kind": "startup", "rows": [], "interrupted": True})
    assert text == "interrupted: the remaining rows are missing\n"


def test_table_of_a_simulated_run_says_so_and_why_its_policy_did_nothing():
    result = {"kind": "serve", "completed": 3, "simulated": True, "hardware": "h100", "idle_policy": "it had no reason"}
    text = printed(result)
    assert "Simulated Serving Benchmark Result" in text
    assert remarks(result) == ["simulated on h100: predicted, not measured", "it had no reason"]
    assert "imulated" not in printed({"kind": "serve", "completed": 3})
