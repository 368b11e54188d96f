"""The server's series during a run, and its queue times."""

import asyncio
import time

import pytest

from jaxserve.bench.sampler import MetricsSampler
from tests.bench.fake_server import FakeServer

PAGE = """
# TYPE jaxserve_num_requests_running gauge
jaxserve_num_requests_running{{model_name="m"}} {running}
# TYPE jaxserve_request_queue_time_seconds histogram
jaxserve_request_queue_time_seconds_bucket{{le="0.1",model_name="m"}} {quick}
jaxserve_request_queue_time_seconds_bucket{{le="0.2",model_name="m"}} {all}
jaxserve_request_queue_time_seconds_bucket{{le="+Inf",model_name="m"}} {all}
jaxserve_request_queue_time_seconds_sum{{model_name="m"}} {seconds}
jaxserve_request_queue_time_seconds_count{{model_name="m"}} {all}
"""


def sampled(script, scrapes: int, **options):
    """Return a sampler that has scraped at least `scrapes` times."""

    async def run():
        async with FakeServer(script) as server:
            async with MetricsSampler(server.url, 0.01, **options) as sampler:
                while len(server.exchanges) < scrapes:
                    await asyncio.sleep(0.01)
            return sampler, server.exchanges

    return asyncio.run(run())


def pages(*served: str | None):
    """Return a script that serves each page in turn and then repeats the last one; None is a 404."""

    async def script(exchange):
        page = served[min(exchange.index, len(served) - 1)]
        await exchange.whole(200 if page else 404, (page or "").encode())

    return script


def test_series_hold_a_value_for_every_time():
    start = time.monotonic()
    sampler, exchanges = sampled(pages(*(PAGE.format(running=n, quick=0, all=0, seconds=0) for n in range(4))), 4)
    series = sampler.series(start)
    assert series["num_requests_running"][:4] == [0, 1, 2, 3]
    assert len(series["t"]) == len(series["num_requests_running"]) == len(exchanges)
    assert 0 <= series["t"][0] < series["t"][-1] <= time.monotonic() - start
    assert series["t"] == sorted(series["t"])


def test_on_scrape_is_called_for_every_scrape():
    told = []
    page = PAGE.format(running=3, quick=0, all=0, seconds=0)
    sampler, _ = sampled(pages(page), 3, on_scrape=lambda time_s, scrape: told.append((time_s, scrape.values)))
    assert [time_s for time_s, _ in told] == sampler.series()["t"]
    assert all(values == {"num_requests_running": 3} for _, values in told)


def test_queue_time_is_that_of_the_requests_of_this_run():
    before = PAGE.format(running=0, quick=100, all=100, seconds=1.0)
    after = PAGE.format(running=0, quick=101, all=104, seconds=1.5)
    sampler, _ = sampled(pages(before, after), 3)
    queue = sampler.queue_time((75, 99))
    assert queue["mean_queue_ms"] == pytest.approx(1e3 * 0.5 / 4)
    assert queue["median_queue_ms"] == pytest.approx(1e3 * (0.1 + 0.1 / 3))
    assert queue["p75_queue_ms"] == pytest.approx(1e3 * (0.1 + 0.2 / 3))
    assert queue.keys() == {"mean_queue_ms", "median_queue_ms", "p75_queue_ms", "p99_queue_ms"}


def test_a_run_without_requests_has_no_queue_time():
    sampler, _ = sampled(pages(PAGE.format(running=0, quick=5, all=5, seconds=1)), 2)
    assert set(sampler.queue_time().values()) == {None}


def test_series_that_starts_later_is_none_before():
    later = "# TYPE jaxserve_a gauge\njaxserve_a 1\n# TYPE jaxserve_b gauge\njaxserve_b 2\n"
    sampler, _ = sampled(pages("# TYPE jaxserve_a gauge\njaxserve_a 1\n", later), 2)
    assert sampler.series()["b"][:2] == [None, 2]


def test_server_without_metrics_has_no_series():
    sampler, exchanges = sampled(pages(None), 1)
    assert (sampler.series(), sampler.queue_time(), len(exchanges)) == ({}, {}, 1)


def test_failed_scrape_is_left_out():
    page = PAGE.format(running=1, quick=0, all=0, seconds=0)
    sampler, exchanges = sampled(pages(page, None, page), 3)
    assert len(sampler.series()["t"]) == len(exchanges) - 1


def test_sampler_of_a_closed_port_has_no_series():
    async def run():
        async with FakeServer(pages(None)) as server:
            url = server.url
        async with MetricsSampler(url, 0.01) as sampler:
            pass
        return sampler.series()

    assert asyncio.run(run()) == {}


def test_sampler_sends_the_api_key():
    _, exchanges = sampled(pages(None), 1, api_key="secret")
    assert exchanges[0].headers["authorization"] == "Bearer secret"
    assert exchanges[0].path == "/metrics"
