"""Load: arrivals, lateness and interruption."""

import asyncio
import signal
import time

import numpy as np
import pytest

from jaxserve.bench.client import Client, Target
from jaxserve.bench.load import Load, run_load
from jaxserve.bench.metrics import summarize
from jaxserve.bench.workload import Sample, Workload
from tests.bench import virtual_loop
from tests.bench.fake_client import FakeClient
from tests.bench.fake_server import FakeServer, answer

SAMPLE = Sample((1, 2, 3), input_tokens=3, output_tokens=4)


def workload(arrivals_s) -> Workload:
    arrivals_s = list(arrivals_s)
    return Workload.of([SAMPLE] * len(arrivals_s), arrivals_s)


def simulate(arrivals_s, client, **options) -> Load:
    """Return the load of a run in virtual time."""

    async def run():
        return await run_load(workload(arrivals_s), client, clock=asyncio.get_running_loop().time, **options)

    return virtual_loop.run(run())


def sent(load: Load) -> list[float]:
    return [record.sent_s for record in load.records]


def test_requests_are_sent_at_their_arrivals_whatever_the_server_does():
    arrivals = np.random.default_rng(0).exponential(0.01, 300).cumsum()
    load = simulate(arrivals, FakeClient(1000.0))
    assert sent(load) == pytest.approx(arrivals, abs=1e-9)
    assert load.client["late"] == 0
    assert load.warning is None


def test_duration_is_from_the_first_arrival_to_the_last_end():
    load = simulate([2.0, 5.0], FakeClient(10.0))
    assert load.duration_s == pytest.approx(13.0)
    assert not load.interrupted


def test_concurrency_limit_delays_due_times():
    load = simulate([0.0, 1.0, 2.0, 50.0], FakeClient(10.0), max_concurrency=2)
    assert [record.arrival_s for record in load.records] == [0.0, 1.0, 2.0, 50.0]
    assert [record.due_s for record in load.records] == pytest.approx([0.0, 1.0, 10.0, 50.0])
    assert sent(load) == pytest.approx([0.0, 1.0, 10.0, 50.0])
    assert load.client["max_lateness_ms"] == pytest.approx(0.0)


def test_client_that_falls_behind_sends_everything_and_warns():
    load = simulate(np.arange(100) * 0.01, FakeClient(0.1, busy_s=0.02))
    assert all(record.ok for record in load.records)
    assert sent(load)[-1] == pytest.approx(100 * 0.02)
    assert load.client["sent"] == 100
    assert load.client["late"] == 100
    assert load.client["max_lateness_ms"] == pytest.approx(1e3 * (100 * 0.02 - 0.99))
    assert load.client["saturated"]
    assert "100 of 100 requests" in load.warning


def test_latency_of_a_late_request_counts_from_its_due_time():
    record = simulate([1.0], FakeClient(0.1, busy_s=0.5)).records[0]
    assert record.ttft_s == pytest.approx(0.6)


def test_one_late_request_in_a_thousand_is_not_saturation():
    class OnceBusy(FakeClient):
        async def send(self, sample, record, now):
            self.busy_s = 0.03 if record.index == 500 else 0.0
            await super().send(sample, record, now)

    load = simulate(np.arange(1000) * 0.1, OnceBusy(0.01))
    assert load.client["late"] == 1
    assert load.client["max_lateness_ms"] == pytest.approx(30.0)
    assert not load.client["saturated"]


def test_lagging_event_loop_is_saturation_even_with_few_requests():
    class Blocking(FakeClient):
        async def send(self, sample, record, now):
            record.sent_s = now()
            for _ in range(20):
                await asyncio.sleep(0.05)
                asyncio.get_running_loop().busy(0.04)
            record.chunk_times_s, record.end_s = [now()], now()

    load = simulate([0.0], Blocking(0.0))
    assert load.client["late"] == 0
    assert load.client["max_loop_lag_ms"] == pytest.approx(40.0, abs=1.0)
    assert load.client["saturated"]


def test_a_burst_due_at_once_does_not_count_as_a_saturated_client():
    load = simulate([0.0] * 200, FakeClient(60.0, busy_s=0.001))
    assert load.client["late"] > 0
    assert not load.client["saturated"]


def test_progress_is_called_once_per_request():
    ended = []
    simulate([0.0, 1.0, 2.0], FakeClient(5.0), on_progress=ended.append)
    assert [record.index for record in ended] == [0, 1, 2]


def test_load_without_requests_is_empty():
    load = simulate([], FakeClient(1.0))
    assert (load.records, load.duration_s, load.warning) == ([], 0.0, None)


def test_interrupted_load_keeps_its_records():
    async def run():
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(run_load(workload([0.0, 1.0, 9.0, 20.0]), FakeClient(3.0), clock=loop.time))
        await asyncio.sleep(10.0)
        task.cancel()
        return await task

    load = virtual_loop.run(run())
    assert load.interrupted
    assert load.duration_s == pytest.approx(10.0)
    assert [record.ok for record in load.records] == [True, True, False, False]
    summary = summarize(load.records, load.duration_s)
    assert (summary["completed"], summary["failed"], summary["unfinished"]) == (2, 0, 2)


def test_error_in_the_client_code_is_raised():
    class Broken:
        async def send(self, sample, record, now):
            raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        simulate([0.0], Broken())
    assert caught.group_contains(ZeroDivisionError)


def test_ctrl_c_ends_the_load_and_keeps_its_records():
    async def run():
        def script(exchange):
            return answer(exchange, tokens=2, every_s=60.0 if exchange.index else 0.0)

        def interrupt(record):
            signal.raise_signal(signal.SIGINT)

        async with FakeServer(script) as server, Client(Target(server.url, "fake")) as client:
            return await run_load(workload([0.0, 0.1, 0.1]), client, on_progress=interrupt)

    load = asyncio.run(run())
    assert load.interrupted
    assert [record.ok for record in load.records] == [True, False, False]
    assert all(record.error is None for record in load.records)


def test_arrivals_at_100_per_second_follow_the_trace_within_5_ms():
    """With the real client, a real server and the machine's clock; exactness is shown above, in virtual time.

    A machine with more to do than cores wakes nobody in time: what counts is the delay beyond that of a task which
    only sleeps until the same times. A client that waits for answers, or that sleeps between requests without looking
    at the clock, is far off.
    """
    arrivals = np.random.default_rng(1).exponential(0.01, 200).cumsum()

    async def sleeper(delays: list[float]) -> None:
        start = time.monotonic()
        for arrival in arrivals:
            await asyncio.sleep(max(start + arrival - time.monotonic(), 0))
            delays.append(time.monotonic() - start - arrival)

    async def run():
        async with FakeServer(answer) as server, Client(Target(server.url, "fake")) as client:
            delays = []
            beside = asyncio.create_task(sleeper(delays))
            load = await run_load(workload(arrivals), client)
            await beside
            return load, np.array(delays)

    def share_in_time() -> float:
        load, delays = asyncio.run(run())
        assert all(record.ok for record in load.records)
        lateness = np.array([record.sent_s - record.arrival_s for record in load.records])
        assert lateness.min() >= 0
        return np.mean(lateness - delays < 0.005)

    assert any(share_in_time() >= 0.9 for _ in range(5))


def test_real_client_that_cannot_keep_up_warns():
    class Slow(Client):
        async def send(self, sample, record, now=time.monotonic):
            time.sleep(0.02)  # a client with too much to do
            await super().send(sample, record, now)

    async def run():
        async with FakeServer(answer) as server, Slow(Target(server.url, "fake")) as client:
            return await run_load(workload(np.arange(50) * 0.01), client)

    load = asyncio.run(run())
    assert all(record.ok for record in load.records)
    assert load.client["saturated"]
    assert load.client["late"] > 25
