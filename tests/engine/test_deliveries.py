"""When outputs are sent back: at once where a request begins or ends with them, and else not more often than pays."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxserve.core.request import RequestOutput
from jaxserve.engine.async_engine import PACE_SECONDS, InstanceThread, Stream


@dataclass
class Steps:
    """A step loop whose steps end when the script says so, in paces; what is None there is a step that fails."""

    script: list[tuple[float, list[RequestOutput] | None]] = field(default_factory=list)
    wake: Callable[[], None] = lambda: None
    paces: float = 0.0

    @property
    def clock(self) -> "Steps":
        return self

    @property
    def idle(self) -> bool:
        return not self.script

    def now(self) -> float:
        return 100.0 + self.paces * PACE_SECONDS

    def step(self) -> list[RequestOutput]:
        self.paces, outputs = self.script.pop(0)
        if outputs is None:
            raise RuntimeError("a step failed")
        return outputs


class Client:
    """Is the loop and the queue of all streams: knows what each call brought."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
        self.calls.append([])
        callback()

    def put_nowait(self, item: RequestOutput | BaseException) -> None:
        self.calls[-1].append(str(item.prompt if isinstance(item, RequestOutput) else type(item).__name__))


def told(request: str, token: int, *, finished: bool = False) -> RequestOutput:
    return RequestOutput(request, f"{request}{token}", (1,), (), finished)


def deliveries(script: list[tuple[float, list[RequestOutput] | None]]) -> list[list[str]]:
    """What each call to the clients' loop brought, of two requests, a and b."""
    steps, client = Steps(), Client()
    anything: Any = client
    thread = InstanceThread(steps, "test")  # type: ignore[arg-type]
    thread.streams.update({name: Stream(anything, anything, anything) for name in "ab"})
    steps.script = list(script)
    steps.wake()
    deadline = time.monotonic() + 20
    while thread.alive and not steps.idle:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    thread.stop()
    thread.join()
    return client.calls


def test_what_begins_and_ends_is_sent_at_once_and_else_together() -> None:
    assert deliveries(
        [
            (0.0, [told("a", 0)]),
            (0.3, [told("a", 1)]),
            (0.6, [told("a", 2)]),
            (1.1, [told("a", 3)]),  # long enough after a0
            (1.2, [told("a", 4)]),
            (1.3, [told("a", 5), told("b", 0)]),  # b begins
            (1.4, [told("a", 6), told("b", 1)]),
            (1.5, [told("b", 2, finished=True)]),
            (9.0, [told("a", 7)]),  # slow steps are told one by one
            (10.1, [told("a", 8)]),
            (10.2, [told("a", 9, finished=True)]),
        ]
    ) == [["a0"], ["a1", "a2", "a3"], ["a4", "a5", "b0"], ["a6", "b1", "b2"], ["a7"], ["a8"], ["a9"]]


def test_what_was_not_sent_yet_comes_before_the_failure() -> None:
    script = [(0.0, [told("a", 0), told("b", 0)]), (0.1, [told("a", 1)]), (0.2, None)]
    assert deliveries(script) == [["a0", "b0"], ["a1"], ["EngineFailed"], ["EngineFailed"]]
