"""Threads for work that grows with the size of a request, to keep it off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
# Up to this size (characters, tokens, log-probabilities) work costs less than handing it to another thread.
MAX_INLINE_SIZE = 4096

# The work is Python and holds the interpreter's lock most of the time: more than two threads would only make the event
# loop wait longer for the lock.
_WORKERS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="jaxserve-request")


async def off_loop(work: Callable[..., T], *args: object) -> T:
    """Return `work(*args)`, computed in a thread while the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(_WORKERS, work, *args)


async def off_loop_if_large(size: int, work: Callable[..., T], *args: object) -> T:
    """Return `work(*args)`, computed in another thread if its input has more than `MAX_INLINE_SIZE` units."""
    return await off_loop(work, *args) if size > MAX_INLINE_SIZE else work(*args)
