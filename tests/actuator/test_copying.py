from types import SimpleNamespace

import pytest

from jaxserve.actuator import copying
from jaxserve.actuator.copying import LayerSource, Throttle
from jaxserve.checkpoint import open_checkpoint


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
    monkeypatch.setattr(copying, "time", clock)
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


def test_layer_read_calls_between_before_each_tensor(tiny_model, monkeypatch):
    """Otherwise the thread would occupy a core while it reads a whole layer."""
    checkpoint = open_checkpoint(tiny_model, "dummy")
    source = LayerSource(checkpoint, checkpoint.config, pin_full=False)
    read, happened = checkpoint.store.get, []

    def noted(name, shape):
        happened.append(name)
        return read(name, shape)

    monkeypatch.setattr(checkpoint.store, "get", noted)
    parameters = source.parameters("layers.1", "float32", between=lambda: happened.append(""))
    assert happened[::2] == [""] * 9, "before each of its nine tensors"
    assert len(set(happened[1::2])) == 9
    assert parameters.keys() == source.parameters("layers.1", "float32").keys()
    happened.clear()
    source.load("layers.1", "int4")
    happened.clear()
    source.parameters("layers.1", "int4", between=lambda: happened.append(""))
    assert happened == [], "what is kept is not read"


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
