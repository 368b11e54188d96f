"""The sweep over request rates: its order, its figures and its report."""

import contextlib
import json
import math
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest

from bench import morph
from bench.morph_parts import rate_report, rates
from bench.morph_parts.prepared import is_prepared
from bench.morph_parts.quality import adaptation_figures
from bench.morph_parts.rate_plots import draw_rates, draw_tpot
from bench.morph_parts.rate_points import QUANTILES, Sustained, light_load, point, points, sustained
from bench.morph_parts.rates import LIGHT_LOAD, SATURATED, Offered, Sweep, Visit, visits
from bench.morph_parts.systems import ACCURACY, FULL, INT4, LABELS, Setup, System
from bench.morph_parts.traffic import Prompts
from jaxserve.bench.result import load, save
from jaxserve.bench.traces.trace import Trace
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.errors import JaxserveError
from tests.bench.morph_results import made_result

FULL_SYSTEM, INT4_SYSTEM, MORPH = (System(name, 10, ()) for name in (FULL, INT4, ACCURACY))
LENGTHS = Trace.of("fixed lengths", [0.0], [192], [96])
OFFERED = Offered(LENGTHS, Prompts(range(1000), "numbers"), seconds=30.0, at_once=40)
SETUP = Setup(bundled_model_path(), kv_pages=56, max_model_len=448, max_num_seqs=8)


def made_run(system, multiple, **changes):
    """Return the result of a run of two requests."""
    result = made_result(
        schema_version=1,
        system=system,
        label=LABELS[system],
        multiple=multiple,
        rate=20.0 * multiple,
        capacity=1920.0,
        completed=2,
        total_input_tokens=384,
        total_output_tokens=8,
        output_throughput=100.0,
        mean_queue_ms=50.0,
        median_queue_ms=40.0,
        p95_queue_ms=90.0,
        generated_texts=["a", "b"],
        prompts=[[1, 2], [3, 4]],
        client={"warning": ""},
        **changes,
    )
    if system == FULL:
        still = {"kv_pages_total": [10] * 5, "num_preemptions_total": [None, 1.0, 4.0, 4.0, 4.0]}
        result["server"] = {"t": result["server"]["t"], "kv_pages_used": result["server"]["kv_pages_used"], **still}
    return result | adaptation_figures(result, None)


def made_sweep():
    """Return runs in which full precision meets the objective of 2 s up to a load of 1, and morph everywhere."""
    slow = {0.5: 0.5, 1.0: 1.0, 1.5: 5.0}
    found = [made_run(FULL, multiple, ttfts=[ttft] * 2) for multiple, ttft in slow.items()]
    found += [made_run(ACCURACY, multiple) for multiple in slow]
    return [*found, made_run(FULL, LIGHT_LOAD), made_run(ACCURACY, LIGHT_LOAD), made_run(FULL, SATURATED)]


# -- the order and the requests


def test_systems_take_turns_in_reverse_order_every_other_time():
    order = visits(FULL_SYSTEM, [FULL_SYSTEM, INT4_SYSTEM], [0.3, 1.0, 1.5], one_server_each=False)
    assert order[0] == Visit(FULL_SYSTEM, (SATURATED,))
    assert [(visit.system.name, visit.multiples) for visit in order[1:]] == [
        *((FULL, (0.3,)), (INT4, (0.3,))),
        *((INT4, (1.0,)), (FULL, (1.0,))),
        *((FULL, (1.5,)), (INT4, (1.5,))),
    ]


def test_a_slow_start_is_paid_once_for_each_system():
    order = visits(FULL_SYSTEM, [MORPH, FULL_SYSTEM], [0.3, 1.0], one_server_each=True)
    assert order == [Visit(FULL_SYSTEM, (SATURATED, 0.3, 1.0)), Visit(MORPH, (0.3, 1.0))]
    alone = visits(FULL_SYSTEM, [MORPH], [0.3], one_server_each=True)
    assert alone == [Visit(FULL_SYSTEM, (SATURATED,)), Visit(MORPH, (0.3,))]


def test_the_rate_is_a_multiple_of_the_capacity_in_requests():
    assert OFFERED.rate(0.5, 1920.0) == 10.0
    assert OFFERED.rate(SATURATED, None) == math.inf


def test_every_system_is_offered_the_same_poisson_arrivals():
    one, other = OFFERED.requests(10.0, 0), OFFERED.requests(10.0, 0)
    assert one.requests == other.requests != OFFERED.requests(10.0, 1).requests
    times = np.array([request.arrival_s for request in one.requests])
    assert len(times) == 300
    assert times[-1] == pytest.approx(30.0)
    gaps = np.diff(times)
    assert 0.8 < gaps.std() / gaps.mean() < 1.2, "the deviation of an exponential distribution is its mean"
    assert {(r.sample.input_tokens, r.sample.output_tokens) for r in one.requests} == {(192, 96)}


def test_saturation_sends_all_requests_at_once():
    requests = OFFERED.requests(math.inf, 0).requests
    assert [request.arrival_s for request in requests] == [0.0] * 40


# -- the runs


@pytest.fixture
def served(monkeypatch):
    """Yield the runs (system, multiple) that were made; the server of int4 does not start."""
    made, current = [], []

    @contextlib.contextmanager
    def started(system):
        if system.name == INT4:
            raise JaxserveError("no memory")
        current[:] = [system.name]
        yield "http://a-server"

    async def measure(url, requests):
        return requests

    def result(system, setup, requests, seen, command):
        count = len(requests.requests)
        rate = math.inf if count == OFFERED.at_once else count / OFFERED.seconds
        made.append((system.name, rate))
        facts = {"num_prompts": 2, "p95_ttft_ms": 1.0, "slo_violation_rate": 0.0, "mean_tpot_ms": 1.0}
        return made_run(system.name, 1.0, **facts, itls=[[0.05] * 3] * 2)

    monkeypatch.setattr(rates, "started", started)
    monkeypatch.setattr(rates, "measure", measure)
    monkeypatch.setattr(rates, "result", result)
    return made


ORDER = visits(FULL_SYSTEM, [FULL_SYSTEM, INT4_SYSTEM, MORPH], [0.3, 1.0], one_server_each=True)


def test_a_server_that_does_not_start_costs_its_own_runs_alone(served, tmp_path):
    missing = Sweep(SETUP, OFFERED, tmp_path, 0).run(FULL_SYSTEM, ORDER)
    assert missing == [f"{LABELS[INT4]} at 0.3x, 1x: no memory"]
    found = rates.read(tmp_path)
    assert [(run["multiple"], run["system"]) for run in found] == [
        *((0.3, FULL), (0.3, ACCURACY), (1.0, FULL), (1.0, ACCURACY), (SATURATED, FULL))
    ]
    assert len({run["capacity"] for run in found}) == 1
    assert found[2]["rate"] == found[2]["capacity"] / 96


def test_a_sweep_is_resumed_where_it_ended(served, tmp_path):
    Sweep(SETUP, OFFERED, tmp_path, 0).run(FULL_SYSTEM, ORDER)
    before = len(served)
    (tmp_path / "1-morph-0.json").unlink()
    Sweep(SETUP, OFFERED, tmp_path, 0, resume=True).run(FULL_SYSTEM, ORDER)
    assert served[before:] == [(ACCURACY, served[2][1])], "with the capacity that was measured before"


def test_a_sweep_whose_time_is_over_says_what_is_missing(served, tmp_path):
    missing = Sweep(SETUP, OFFERED, tmp_path, 0, deadline_s=0.0).run(FULL_SYSTEM, ORDER)
    assert missing == [f"{LABELS[FULL]} at saturation, 0.3x, 1x: no time was left"]
    assert not served


# -- the figures


def test_a_point_has_the_figures_of_all_rounds():
    found = point([made_run(FULL, 1.5, ttfts=[1.0, 3.0]), made_run(FULL, 1.5, ttfts=[1.0, 1.0], round=1)])
    assert (found.rounds, found.requests, found.violations) == (2, 4, 0.25)
    assert (found.tpot_mean_ms, found.tpot_p99_ms) == (pytest.approx(100), pytest.approx(100))
    assert len(found.tpot_cdf_ms) == len(QUANTILES) == 20
    assert (found.queue_mean_ms, found.queue_p50_ms, found.queue_p95_ms) == (50, 40, 90)
    assert found.preemptions == 8, "a counter without a value before the first preemption began at 0"
    assert (found.decisions, found.swaps, found.restored_s) == (0, 0, 0.7)


def test_kv_use_counts_only_while_requests_are_served():
    found = point([made_run(ACCURACY, 1.0)])  # the last answer ends at 2.8
    assert (found.kv_used_mean, found.kv_used_max) == (pytest.approx((0 + 0.9 + 0.95) / 3), pytest.approx(0.95))
    assert (found.swaps, found.peak_kv_pages) == (4, 20)


def test_the_mean_of_the_queue_weighs_requests():
    one, other = made_run(FULL, 1.0), made_run(FULL, 1.0, round=1) | {"completed": 6, "mean_queue_ms": 10.0}
    assert point([one, other]).queue_mean_ms == pytest.approx(20.0)


def test_a_run_that_was_never_restored_has_no_time_of_it():
    assert point([made_run(ACCURACY, 1.0, restored_after_s=None)]).restored_s is None


def test_a_run_without_answers_has_a_point():
    failed = made_run(FULL, 1.0, errors=["refused"] * 2, output_lens=[0, 0], itls=[[], []])
    found = point([failed | {"mean_queue_ms": None, "output_throughput": None}])
    assert (found.failed, found.violations) == (2, 1.0)
    assert (found.tpot_mean_ms, found.ttft_p95_s, found.queue_mean_ms, list(found.tpot_cdf_ms)) == (
        None,
        None,
        None,
        [],
    )


def test_points_leave_out_saturation_and_are_in_order():
    assert [(p.multiple, p.system) for p in points(made_sweep())] == [
        (multiple, system) for multiple in (LIGHT_LOAD, 0.5, 1.0, 1.5) for system in (FULL, ACCURACY)
    ]


def test_the_sustained_load_is_interpolated_where_the_objective_is_missed_first():
    found = points(made_sweep())
    assert sustained(found, 2.0) == [Sustained(FULL, 1.125, True), Sustained(ACCURACY, 1.5, False)]
    assert sustained(found, 0.1)[0] == Sustained(FULL, None, True)
    assert sustained([replace(found[0], ttft_p95_s=None)], 2.0) == [Sustained(FULL, None, False)]


def test_light_load_without_change_or_difference_is_unharmed():
    full, quiet = made_run(FULL, LIGHT_LOAD), made_run(ACCURACY, LIGHT_LOAD)
    quiet["adaptation"]["transitions"] = {}
    (check,) = light_load([full, quiet])
    assert (check.transitions, check.identical, check.answers, check.is_unharmed) == (0, 2, 2, True)


@pytest.mark.parametrize(
    "changes",
    [
        {"generated_texts": ["a", "c"]},
        {"errors": ["", "refused"]},
        {"adaptation": {"transitions": {"done": 1}}},
        {"adaptation": {"transitions": {"failed": 1}}},
    ],
)
def test_any_difference_at_light_load_is_harm(changes):
    quiet = made_run(ACCURACY, LIGHT_LOAD)
    quiet["adaptation"]["transitions"] = {}
    (check,) = light_load([made_run(FULL, LIGHT_LOAD), quiet | changes])
    assert not check.is_unharmed


def test_harm_at_light_load_names_the_first_reason():
    decisions = [{"time": 1.0, "reason": reason} for reason in ("queue | 325 ms > 100 ms", "KV usage")]
    (check,) = light_load([made_run(FULL, LIGHT_LOAD), made_run(ACCURACY, LIGHT_LOAD, decisions=decisions)])
    assert check.reason == "queue | 325 ms > 100 ms"
    assert rate_report.light_table([check]).endswith("| **no** | queue / 325 ms > 100 ms |")


def test_light_load_is_compared_in_the_same_round():
    assert light_load([made_run(FULL, LIGHT_LOAD), made_run(ACCURACY, LIGHT_LOAD, round=1)]) == []


# -- the report


def test_the_report_is_made_from_the_document_alone(tmp_path):
    missing = ["static int4 at 1.5x: no time was left"]
    made = rate_report.document(made_sweep(), SETUP, quantised_by="layers prepared by AWQ", missing=missing)
    save(made, tmp_path / "rates.json")
    saved = load(tmp_path / "rates.json")
    assert rate_report.points_of(saved) == [replace(p) for p in points(made_sweep())]
    text = rate_report.report(saved)
    assert "1920 tokens/s" in text
    assert "Prompts have 192 and answers 4 tokens" in text
    assert "| 1.5x (30.0/s) | full precision | 2 | 100.0% | 5.00 / 5.00 | 100.0 / 100.0 / 100.0 / 100.0 |" in text
    assert "| full precision | 1.12x |" in text
    assert "| morph, accuracy | at least 1.50x |" in text
    assert "| morph, accuracy | 4 | 2 of 2 | **no** |" in text
    assert missing[0] in text
    json.dumps(asdict(rate_report.points_of(saved)[0]), allow_nan=False)


def test_the_report_writes_tables_and_pictures(tmp_path):
    rate_report.write(made_sweep(), SETUP, tmp_path, quantised_by="rounding", missing=())
    assert {path.name for path in tmp_path.iterdir()} == {"rates.json", "rates.md", "rates.png", "tpot.png"}
    assert (tmp_path / "tpot.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_leave_out_what_was_not_measured():
    found = [replace(p, ttft_p95_s=None, violations=None, tpot_cdf_ms=[]) for p in points(made_sweep())]
    assert draw_rates(found, 2.0, "nothing").startswith(b"\x89PNG")
    assert draw_tpot([], "nothing").startswith(b"\x89PNG")


def test_the_bundled_model_is_not_prepared():
    assert not is_prepared(bundled_model_path())


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        (["--models", "9b"], "choose from bundled, 160m, 8b, tiny"),
        (["--systems", "full,other"], "unknown: other; choose from full, int4"),
        (["--rates", "0,1"], "rates are finite and above 0"),
        (["--lengths", "192"], "PROMPT+ANSWER, such as 192+96, nor burst"),
    ],
)
def test_unknown_options_are_refused_with_what_is_allowed(words, allowed, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["morph", "rates", *words])
    with pytest.raises(SystemExit):
        morph.main()
    assert allowed in capsys.readouterr().err
