from types import SimpleNamespace

import pytest

from jaxserve.actuator import copying
from jaxserve.actuator.copying import Throttle


class Thread:
    """Works and waits in a time of its own."""

    def __init__(self):
        self.now = self.worked = self.waited = 0.0

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.worked += seconds

    def stand(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.waited += seconds


@pytest.fixture
def thread(monkeypatch) -> Thread:
    thread = Thread()
    clock = SimpleNamespace(monotonic=lambda: thread.now, thread_time=lambda: thread.worked)
    monkeypatch.setattr(copying, "time", clock)
    return thread


def test_large_arrays_take_the_time_that_their_bytes_may(thread):
    throttle = Throttle(1e9, 0.1, lambda: True, thread.wait)
    thread.work(0.01)
    throttle.copied(500_000_000)
    assert thread.now == pytest.approx(0.5)


def test_small_arrays_take_no_more_of_a_core_than_their_share(thread):
    throttle = Throttle(1e9, 0.1, lambda: True, thread.wait)
    for _ in range(3):
        thread.work(0.002)
        throttle.copied(1000)
    assert thread.now == pytest.approx(3 * 0.02)


def test_time_without_the_core_counts_as_waited(thread):
    throttle = Throttle(1e9, 0.1, lambda: True, thread.wait)
    thread.work(0.002)
    thread.stand(0.015)
    throttle.copied(1000)
    assert thread.waited == pytest.approx(0.003)
    thread.work(0.002)
    thread.stand(1.0)
    throttle.copied(1000)
    assert thread.waited == pytest.approx(0.003)


def test_nothing_waits_where_no_steps_run(thread):
    throttle = Throttle(1e9, 0.1, lambda: False, thread.wait)
    thread.work(0.01)
    throttle.copied(500_000_000)
    assert thread.waited == 0
