"""The measurement of adaptation: its tables, verdicts and plots."""

import pytest

from bench.morph_parts import plots
from bench.morph_parts.steady import Exchange, exchange_table
from bench.morph_parts.summary import cells, verdict_table, verdicts, workload_tables
from bench.morph_parts.systems import ACCURACY, FULL, INT4, LABELS, NAMES, PERFORMANCE
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
