"""An engine with few pages, thresholds that act within a second, and a load that makes a policy act on any machine."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

OPTIONS = {
    "load_format": "dummy",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 4 + 32,
    "memory_gb": 4,
    "kv_pages": 20,
    "max_model_len": 256,
}
QUICK = {"release_quiet": 0.3, "release_interval": 0.1, "entry_hold": 0.0, "entry_interval": 0.1}
AT_ONCE = 30  # requests of a burst

T = TypeVar("T")


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never comes true"
        await asyncio.sleep(0.01)


async def burst_until(
    condition: Callable[[], bool], ask: Callable[[int], Coroutine[Any, Any, T]]
) -> list[asyncio.Task[T]]:
    """Keep `AT_ONCE` requests (`ask(seed)`) under way until a condition holds, and return all of them."""
    asked: list[asyncio.Task[T]] = []

    def pressed() -> bool:
        for _ in range(AT_ONCE - sum(not task.done() for task in asked)):
            asked.append(asyncio.create_task(ask(len(asked))))
        return condition()

    await until(pressed)
    return asked
