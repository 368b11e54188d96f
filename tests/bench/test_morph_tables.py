"""The adaptation measurement: tables, verdicts and plots."""

import itertools
from dataclasses import replace

import pytest

from bench.morph_parts import plots
from bench.morph_parts.steady import PlanChange, found_in, plan_change_table
from bench.morph_parts.summary import cells, verdict_table, verdicts, workload_tables
from bench.morph_parts.systems import ACCURACY, FULL, INT4, INT8, LABELS, NAMES, PERFORMANCE
from jaxserve.engine.step_log import DecisionRecord, Recording, Step
from tests.bench.morph_results import made_results


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
    assert met["morph, performance: no transitions under light load"] is True
    assert "burst 16.00x" in judged["morph, performance: P95 TTFT at least 10x better, in every trace"].measured
    assert "**missed**" in verdict_table(list(judged.values()))


@pytest.mark.parametrize(("share", "met"), [(0.93, (True, True)), (0.925, (False, True)), (0.92, (False, False))])
def test_agreement_is_judged_beside_that_of_full_precision_with_itself(share, met):
    shares = {FULL: 0.95, INT4: 0.90, ACCURACY: share, INT8: 0.95, PERFORMANCE: 0.90}
    results = [result | {"agreement": {"share": shares[result["system"]]}} for result in made_results()]
    judged = {verdict.target: verdict.met for verdict in verdicts(cells(results))}
    what = "(agreement with full precision), in every trace"
    found = (judged[f"morph, accuracy: loses at most {limit} {what}"] for limit in ("2.2 %", "half of static int4"))
    assert tuple(found) == met
    assert judged[f"morph, int8: loses at most half of static int4 {what}"] is True


def test_exchange_table_has_a_row_per_direction():
    to_int4 = [PlanChange("int4", 0.2, 7, 0.010, 0.011, 0.02), PlanChange("int4", 0.3, 9, 0.010, 0.013, 0.03)]
    table = plan_change_table([*to_int4, PlanChange("full", 0.1, 4, 0.01, 0.01, 0.01)])
    assert "| int4 | 2 | 250 | 8 | 10.00 | 1.20x | 1.30x | 25.0 |" in table
    assert "| full | 1 | 100 | 4 | 10.00 | 1.00x | 1.00x | 10.0 |" in table


def test_exchanges_are_found_in_a_step_log():
    """Steps of 10 ms; from the decision at 1.0 until the second step of the plan after, of 15, and one of 40."""
    lasting = [*[0.01] * 100, *[0.015] * 8, 0.04, 0.015, *[0.01] * 50]
    ends = itertools.accumulate(lasting)
    versions = [1] * 108 + [4] * 52
    steps = [
        Step(0, n, end - 0.01, end - 0.01, end, 4, 4, 4, 100, int(n in (97, 103)), 0, 0, version)
        for n, (end, version) in enumerate(zip(ends, versions, strict=True))
    ]
    swaps = tuple(f"instance 0: layers.{n} bfloat16 -> int4 (frees 1.0 MB, about 5 ms)" for n in range(3))
    grown = "instance 0: KV 50 -> 60 pages (needs 1.0 MB)"
    decided = [
        DecisionRecord(0.2, "morph", "two things at once", 0, 1, (swaps[0], grown), "started"),
        DecisionRecord(1.0001, "manual", "the operator's plan", 1, 4, swaps, "started"),
        DecisionRecord(9.0, "manual", "nothing ran since", 4, 7, swaps, "started"),
    ]
    (found,) = found_in(Recording({}, steps=tuple(steps), decisions=tuple(decided)))
    assert (found.after, found.steps) == ("int4", 9), "of ten steps one had a prompt"
    times = found.seconds, found.step_before_s, found.step_during_s, found.max_gap_s
    assert times == pytest.approx((0.1749, 0.01, (8 * 0.015 + 0.04) / 9, 0.04))
    for pages, after in (((50, 60), "more pages"), ((60, 50), "fewer pages")):
        resized = decided[1]._replace(transitions=("instance 0: KV {} -> {} pages (frees 1.0 MB)".format(*pages),))
        (other,) = found_in(Recording({}, steps=tuple(steps), decisions=(resized,)))
        assert other == replace(found, after=after)


def test_run_that_is_never_restored_misses_the_target():
    results = [result | {"restored_after_s": None} for result in made_results()]
    judged = {verdict.target: verdict.met for verdict in verdicts(cells(results))}
    assert judged["morph, accuracy: restored within 10 s of the end, every time"] is False


def test_layers_in_int8_are_judged_where_they_were_measured():
    without = [result for result in made_results() if result["system"] != INT8]
    labels = [{verdict.target.split(":")[0] for verdict in verdicts(cells(some))} for some in (made_results(), without)]
    assert labels[0] - labels[1] == {LABELS[INT8]}


def test_verdicts_without_results_are_not_measured():
    assert {verdict.met for verdict in verdicts({})} == {None}


def test_plots_are_png_files():
    chosen = [result for result in made_results() if result["traffic"] == "burst"]
    assert plots.draw(chosen, "a burst").startswith(b"\x89PNG")
