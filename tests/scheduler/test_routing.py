"""The router sends a request to the least loaded instance that can hold it."""

import pytest

from jaxserve.core.request import Request
from jaxserve.core.sampling import SamplingParams
from jaxserve.scheduler.routing import Route, Router, UnroutedQueue, tokens_needed
from jaxserve.telemetry import WaitingRoom


def request(prompt: int, max_tokens: int | None, *, embed: bool = False) -> Request:
    return Request("r", (7,) * prompt, SamplingParams(max_tokens=max_tokens), arrival=0.0, embed=embed)


def test_request_needs_its_prompt_and_its_answer() -> None:
    assert tokens_needed(request(10, 5)) == 15
    assert tokens_needed(request(10, None)) == 11
    assert tokens_needed(request(10, 1, embed=True)) == 10


def test_equal_instances_get_requests_by_outstanding_tokens_and_the_first_of_equals() -> None:
    router = Router([Route("a", 100), Route("b", 100)])
    assert [router.take(10, 20), router.take(30, 40), router.take(5, 6), router.take(5, 6)] == ["a", "b", "a", "a"]
    router.ended("b", 30)
    assert router.take(1, 2) == "b"


def test_load_is_counted_for_each_device() -> None:
    router = Router([Route("one", 100), Route("four", 100, devices=4)])
    assert [router.take(10, 20) for _ in range(5)] == ["one", "four", "four", "four", "four"]


def test_long_request_goes_where_it_fits_even_if_that_instance_is_loaded() -> None:
    router = Router([Route("small", 100), Route("large", 400, devices=2)])
    for _ in range(3):
        assert router.take(200, 300) == "large"
    assert router.capacity == 400
    assert router.take(300, 401) is None
    assert router.take(10, 20) == "small"


def test_draining_instance_gets_only_what_no_other_can_hold() -> None:
    router = Router([Route("small", 100), Route("large", 400, draining=True)])
    assert [router.take(10, 20) for _ in range(3)] == ["small"] * 3
    assert router.take(200, 300) == "large"
    router.update([Route("only", 100, draining=True)])
    assert router.take(10, 20) == "only"


def test_update_keeps_the_tokens_of_instances_that_stay() -> None:
    router = Router([Route("a", 100), Route("b", 100)])
    router.take(10, 20)
    router.update([Route("a", 100), Route("c", 100)])
    assert router.take(5, 6) == "c"
    router.ended("b", 5)  # its instance has gone
    router.update([Route("a", 100), Route("c", 100)], {"a": 1, "c": 2})
    assert router.take(5, 6) == "a"


def test_router_without_instances_holds_nothing() -> None:
    assert Router().take(1, 1) is None
    assert Router().capacity == 0


def test_waiting_queue_keeps_the_order_and_tells_what_waits() -> None:
    queue: UnroutedQueue[str] = UnroutedQueue()
    queue.add("first", since=1.0, tokens=10, needed=20)
    queue.add("second", since=2.0, tokens=5, needed=50)
    assert queue.in_order() == ("first", "second")
    assert queue.snapshot(4.0) == WaitingRoom(4.0, 2, 15, longest=50, oldest_wait=3.0)
    queue.remove("first")
    queue.remove("unknown")
    assert queue.snapshot(4.0) == WaitingRoom(4.0, 1, 5, longest=50, oldest_wait=2.0)
    queue.remove("second")
    assert queue.snapshot(5.0) == WaitingRoom(5.0)
    assert not queue


@pytest.mark.parametrize("capacity", [0, 99])
def test_request_that_no_instance_can_hold_is_not_counted(capacity: int) -> None:
    router = Router([Route("a", capacity), Route("b", 10)])
    assert router.take(50, 100) is None
    assert router.take(5, 6) == ("a" if capacity else "b")
