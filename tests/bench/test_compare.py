import io
from typing import Any

import pytest
from rich.console import Console

from jaxserve.bench.compare import print_side_by_side, side_by_side
from jaxserve.core.errors import ConfigError


def serve(label: str | None, throughput: float, **more: Any) -> dict[str, Any]:
    return {"kind": "serve", "label": label, "model_id": "tiny", "request_throughput": throughput, **more}


def printed(results: list[dict[str, Any]], *, terminal: bool = False) -> str:
    file = io.StringIO()
    print_side_by_side(results, Console(file=file, force_terminal=terminal, width=120))
    return file.getvalue()


def test_repeats_of_a_label_become_a_median_with_its_range():
    comparison = side_by_side([serve("a", 10.0), serve("b", 21.0), serve("a", 12.0), serve("b", 19.0), serve("a", 8.0)])
    assert comparison.labels == ("a", "b")
    assert comparison.runs == (3, 2)
    (row,) = comparison.figures
    assert row.spreads[0] is not None
    assert (row.spreads[0].median, row.spreads[0].low, row.spreads[0].high) == (10.0, 8.0, 12.0)
    assert row.ratio(1) == 2.0
    assert not row.within_spread(1)


def test_overlapping_ranges_are_marked():
    overlapping = [serve("a", 10.0), serve("a", 12.0), serve("b", 11.0), serve("b", 13.0)]
    assert "~1.09x" in printed(overlapping)
    assert "~" not in printed([serve("a", 10.0), serve("b", 10.0)])  # single runs tell nothing of noise


def test_results_of_one_label_are_compared_with_each_other():
    assert side_by_side([serve(None, 1.0), serve(None, 2.0)]).labels == ("tiny #1", "tiny #2")


def test_figure_of_one_configuration_alone_has_no_ratio():
    comparison = side_by_side([serve("a", 10.0, mean_ttft_ms=None), serve("b", 10.0, mean_ttft_ms=5.0)])
    ttft = next(row for row in comparison.figures if row.name == "Mean TTFT (ms)")
    assert ttft.spreads[0] is None
    assert ttft.ratio(1) is None


def test_differences_of_load_workload_and_machine_are_noted():
    here = {"cpu": "one CPU", "date": "today"}
    there = {"cpu": "another CPU", "date": "tomorrow"}
    comparison = side_by_side(
        [
            serve("a", 1.0, seed=0, workload={"dataset": "random"}, environment=here),
            serve("b", 1.0, seed=1, workload={"dataset": "trace"}, environment=there, interrupted=True),
        ]
    )
    assert comparison.notes == (
        "the load differs in seed: 0 / 1",
        "the workload differs in dataset: random / trace",
        "the machine differs in cpu: one CPU / another CPU",
        "b: a run was interrupted",
    )


def test_offline_rows_are_matched_by_what_they_measured():
    def offline(label: str, *rows: dict[str, Any]) -> dict[str, Any]:
        return {"kind": "latency", "label": label, "rows": list(rows)}

    comparison = side_by_side(
        [
            offline("a", {"batch": 1, "step_ms": 2.0}, {"batch": 8, "step_ms": 4.0}),
            offline("b", {"batch": 8, "step_ms": 6.0}, {"batch": 32, "step_ms": 9.0}),
        ]
    )
    assert [(row.name, row.ratio(1)) for row in comparison.figures] == [
        ("batch=1: step_ms", None),
        ("batch=8: step_ms", 1.5),
        ("batch=32: step_ms", None),
    ]


def test_a_comparison_is_saved_as_flat_rows():
    flat = side_by_side([serve("a", 10.0), serve("b", 20.0), serve("b", 30.0)]).flat()
    assert flat == [
        {"metric": "Requests/s", "a": 10.0, "a min": 10.0, "a max": 10.0}
        | {"b": 25.0, "b min": 20.0, "b max": 30.0, "b ratio": 2.5}
    ]


def test_comparison_of_different_kinds_is_refused():
    with pytest.raises(ConfigError, match="latency, serve"):
        side_by_side([serve("a", 1.0), {"kind": "latency", "rows": []}])
    with pytest.raises(ConfigError, match="none"):
        side_by_side([])


def test_a_trace_replay_is_compared_with_a_served_dataset():
    assert side_by_side([serve("a", 1.0), serve("b", 2.0) | {"kind": "trace"}]).figures[0].ratio(1) == 2.0


def test_comparison_in_a_terminal_shows_the_same_numbers():
    results = [serve("a", 10.0), serve("b", 25.0)]
    for text in (printed(results), printed(results, terminal=True)):
        assert "25.00" in text
        assert "2.50x" in text


def test_simulated_results_are_noted():
    real, predicted = serve("real", 1.0), serve("predicted", 1.0, simulated=True)
    notes = side_by_side([real, predicted]).notes
    assert "predicted: simulated, not measured" in notes
    assert not [note for note in notes if note.startswith("real:")]
