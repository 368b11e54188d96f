"""Work that grows with what a client sends, away from the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# Two threads: the work is Python and holds the interpreter's lock most of the time, so that more of them would only
# make the event loop wait longer for it.
_WORKERS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="jaxserve-request")


async def off_loop(work: Callable[..., T], *args: object) -> T:
    """Return `work(*args)`, computed in one of a few threads; the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(_WORKERS, work, *args)
