from types import SimpleNamespace

import pytest

from jaxserve.actuator import throttle as module
from jaxserve.actuator.throttle import Throttle


class SimulatedThread:
    """A thread that works and waits in a time of its own."""

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
def thread(monkeypatch) -> SimulatedThread:
    thread = SimulatedThread()
    clock = SimpleNamespace(monotonic=lambda: thread.now, thread_time=lambda: thread.worked)
    monkeypatch.setattr(module, "time", clock)
    return thread


def test_copy_of_large_arrays_keeps_to_the_byte_rate(thread):
    throttle = Throttle(1e9, 0.1, lambda: True, thread.wait)
    thread.work(0.01)
    throttle.copied(500_000_000)
    assert thread.now == pytest.approx(0.5)


def test_copy_of_small_arrays_keeps_to_its_share_of_a_core(thread):
    throttle = Throttle(1e9, 0.1, lambda: True, thread.wait)
    for _ in range(3):
        thread.work(0.002)
        throttle.copied(1000)
    assert thread.now == pytest.approx(3 * 0.02)


def test_throttled_work_without_a_copy_keeps_to_its_share_of_a_core(thread):
    throttle = Throttle(1e9, 0.1, lambda: True, thread.wait)
    for _ in range(3):
        thread.work(0.002)
        throttle.worked()
    assert thread.now == pytest.approx(3 * 0.02)


def test_throttle_counts_time_without_the_core_as_waiting(thread):
    throttle = Throttle(1e9, 0.1, lambda: True, thread.wait)
    thread.work(0.002)
    thread.stand(0.015)
    throttle.copied(1000)
    assert thread.waited == pytest.approx(0.003)
    thread.work(0.002)
    thread.stand(1.0)
    throttle.copied(1000)
    assert thread.waited == pytest.approx(0.003)


def test_throttle_without_running_steps_never_waits(thread):
    throttle = Throttle(1e9, 0.1, lambda: False, thread.wait)
    thread.work(0.01)
    throttle.copied(500_000_000)
    assert thread.waited == 0
