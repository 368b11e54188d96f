"""Threads for work that grows with the size of a request, to keep it off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# The work is Python and holds the interpreter's lock most of the time: more than two threads would only make the event
# loop wait longer for the lock.
_WORKERS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="jaxserve-request")


async def off_loop(work: Callable[..., T], *args: object) -> T:
    """Return `work(*args)`, computed in a thread while the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(_WORKERS, work, *args)
