import numpy as np
import pytest

from jaxserve.bench.record import RequestRecord
from jaxserve.bench.report import series
from jaxserve.bench.report.series import RatePoint, Requests
from tests.bench import simulated


def test_latencies_come_back_as_they_were_recorded():
    records, _ = simulated.simulate(5.0, n=30)
    simulated.fail(records[:2], "HTTP 503")
    requests = Requests.of(simulated.result_of(records))
    for name in ("ttft", "tpot", "e2el"):
        expected = [getattr(record, f"{name}_s") if record.ok else None for record in records]
        np.testing.assert_allclose(requests.metric(name), np.array(expected, float), rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(requests.end_s, [record.end_s for record in records], atol=1e-5)
    assert requests.failed.tolist() == [True] * 2 + [False] * 28


def test_an_offline_result_has_no_requests():
    requests = Requests.of({"kind": "latency", "rows": []})
    assert all(len(requests.metric(name)) == 0 for name in ("ttft", "tpot", "e2el"))


def test_in_flight_counts_from_the_start_to_the_end():
    records = [
        RequestRecord(0, due_s=1.0, arrival_s=0.0, input_tokens=1, chunk_times_s=[3.0], end_s=3.0, output_tokens=1),
        RequestRecord(1, due_s=2.0, arrival_s=0.0, input_tokens=1, chunk_times_s=[4.0], end_s=4.0, output_tokens=1),
        RequestRecord(2, due_s=3.0, arrival_s=0.0, input_tokens=1, chunk_times_s=[5.0], end_s=5.0, output_tokens=1),
    ]
    times, counts = series.in_flight(Requests.of(simulated.result_of(records)))
    assert times.tolist() == [1.0, 2.0, 3.0, 3.0, 4.0, 5.0]
    assert counts.tolist() == [1, 2, 1, 2, 1, 0]


def test_server_series_are_found_by_name_and_label():
    result = {
        "server": {
            "t": [0.0, 1.0],
            "num_requests_running": [1, None],
            'layers_by_precision{precision="bf16"}': [4, 2],
            'layers_by_precision{precision="int8"}': [0, 2],
            "layers_by_precision_other": [9, 9],
        }
    }
    running = series.server_series(result, "num_requests_running")
    assert running is not None
    assert running[0] == 1
    assert np.isnan(running[1])
    layers = series.server_series_by(result, "layers_by_precision", "precision")
    assert {name: values.tolist() for name, values in layers.items()} == {"bf16": [4, 2], "int8": [0, 2]}
    total = series.server_series(result, "layers_by_precision")
    assert total is not None
    assert total.tolist() == [4, 4]
    assert series.server_series(result, "kv_pages_used") is None


def test_only_changes_of_the_plan_are_marked():
    server = {"t": [0.0, 1.0, 2.0, 3.0, 4.0], "plan_version": [7, 7, 8, None, 9]}
    assert series.plan_changes({"server": server})[0] == (2.0, 8)
    assert series.plan_changes({"server": {"t": [0.0, 1.0], "plan_version": [1, 1]}}) == []
    assert series.plan_changes({}) == []


@pytest.mark.parametrize(
    ("duration", "events", "width"), [(60, 10_000, 1), (90, 10_000, 2), (600, 10_000, 10), (60, 25, 20), (0, 1, 0.001)]
)
def test_bins_are_round_and_not_too_many(duration: float, events: int, width: float):
    assert series.bin_width(duration, events) == pytest.approx(width)


def test_rates_count_every_event_once():
    edges, rates = series.rate(np.array([0.0, 0.5, 1.5, 3.0]), 1.0, 3.0)
    assert edges.tolist() == [0, 1, 2, 3]
    assert (rates * np.diff(edges)).sum() == 4


def test_bins_without_values_are_left_out():
    times, medians = series.binned(np.array([0.1, 0.2, 0.3, 5.0, 6.0]), np.array([1, 2, 3, 9, np.nan]), 1.0, 50)
    assert times.tolist() == [0.5, 5.5]
    assert medians.tolist() == [2, 9]


def test_a_cdf_ends_at_one_and_ignores_what_never_came():
    values, shares = series.cdf(np.array([3.0, np.nan, 1.0]))
    assert values.tolist() == [1.0, 3.0]
    assert shares.tolist() == [0.5, 1.0]


def point(rate: float, served: float) -> RatePoint:
    return RatePoint(rate, served, output_tokens=100, median_ttft_s=0.1, p99_ttft_s=0.2)


def test_saturation_lies_between_the_last_rate_kept_up_with_and_the_first_that_was_not():
    points = [point(8, 0.75), point(2, 1.0), point(4, 1.0), point(6, 0.90)]
    assert series.saturation(points) == pytest.approx(5.0)  # half way from 1.0 to 0.90 lies 0.95


def test_saturation_is_unknown_where_no_run_shows_it():
    assert series.saturation([point(1, 1.0), point(2, 0.99)]) is None
    assert series.saturation([point(1, 0.5), point(2, 0.3)]) is None
    assert series.saturation([]) is None


def fixed_capacity(rate: float, capacity: float, latency: float, n: int = 200) -> dict:
    """Return a result with requests at even distances to a server of `capacity` requests per second.

    Each request takes `latency` seconds.
    """
    records, free = [], 0.0
    for index in range(n):
        arrival = index / rate
        free = max(free, arrival) + 1 / capacity
        end = free + latency
        times = {"chunk_times_s": [end - latency / 2, end], "end_s": end, "output_tokens": 2}
        records.append(RequestRecord(index, due_s=arrival, arrival_s=arrival, input_tokens=1, **times))
    return simulated.result_of(records, rate=rate)


def test_a_server_that_keeps_up_is_not_blamed_for_the_time_its_last_requests_take():
    served = series.rate_point(fixed_capacity(rate=10, capacity=20, latency=10.0))
    assert served is not None
    assert served.served == pytest.approx(1.0)


def test_a_saturated_server_serves_its_capacity():
    served = series.rate_point(fixed_capacity(rate=20, capacity=10, latency=5.0))
    assert served is not None
    assert served.rate * served.served == pytest.approx(10, rel=0.02)


def test_refused_requests_are_not_served():
    result = fixed_capacity(rate=10, capacity=20, latency=0.1)
    result["errors"] = ["HTTP 503" if index % 2 else "" for index in range(200)]
    served = series.rate_point(result)
    assert served is not None
    assert served.served == pytest.approx(0.5, rel=0.02)


def test_run_with_all_requests_at_once_has_no_rate():
    records = [
        RequestRecord(i, due_s=0.0, arrival_s=0.0, input_tokens=1, chunk_times_s=[1.0 + i], end_s=1.0 + i)
        for i in range(5)
    ]
    assert series.rate_point(simulated.result_of(records, rate=float("inf"))) is None
