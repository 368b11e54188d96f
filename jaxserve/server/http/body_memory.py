"""A bound on the memory that the bodies of all requests in progress take together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.exceptions import HTTPException

# Bodies up to this size are not counted, since the number of connections bounds them.
SMALL_BODY_BYTES = 64 * 1024
BODY_MEMORY_BYTES = 512 * 1024 * 1024
SLOW_SECONDS = 1.0  # a body that has been arriving for this time gives way to others
MIN_FULL_BODIES = 4  # bodies of the maximum size that fit in any case


class BodyMemory:
    """The bytes of the bodies of all requests in progress, and the bodies that are still arriving, oldest first."""

    def __init__(self, max_body_bytes: int):
        self.limit = max(BODY_MEMORY_BYTES, MIN_FULL_BODIES * max_body_bytes)
        self.used = 0
        self.arriving: dict[HeldBody, float] = {}  # time at which each began to arrive

    def make_room(self, size: int, for_body: "HeldBody") -> None:
        """Refuse the oldest of the bodies that arrive slowly, until `size` more bytes fit.

        A client that sends slowly therefore cannot keep others from sending. Raise HTTPException if no other body is
        slow, or if `for_body` is the oldest of them.
        """
        now = asyncio.get_running_loop().time()
        while self.used + size > self.limit:
            oldest = next((body for body in self.arriving if body.size or body is for_body), for_body)
            if oldest is for_body or now - self.arriving[oldest] < SLOW_SECONDS:
                raise self.full()
            oldest.evict()

    def full(self) -> HTTPException:
        """Return the error for a body that finds no room."""
        message = (
            f"the bodies of the requests in progress fill the memory for them ({self.limit} bytes, or four times "
            f"--max-body-mb if that is more): send the request again later; bodies of up to "
            f"{SMALL_BODY_BYTES} bytes always fit"
        )
        return HTTPException(503, message, {"retry-after": "1", "connection": "close"})


class HeldBody:
    """The body of one request, which is counted until the request has been answered."""

    def __init__(self, memory: BodyMemory):
        self.size = 0  # counted bytes
        self._memory = memory
        self._evicted = False
        self._arrival: asyncio.Timeout

    @contextlib.asynccontextmanager
    async def arriving(self, timeout: float) -> AsyncIterator[None]:
        """Limit the block, which receives the body, to `timeout` seconds.

        Raise TimeoutError after this time, and HTTPException if the body has been evicted.
        """
        try:
            async with asyncio.timeout(timeout) as self._arrival:
                self._memory.arriving[self] = asyncio.get_running_loop().time()
                yield
        except TimeoutError:
            if not self._evicted:
                raise
        finally:
            self._memory.arriving.pop(self, None)
        if self._evicted:
            raise self._memory.full()

    def resize(self, size: int) -> None:
        """Count a body of `size` bytes. If there is no room, count it no longer and raise HTTPException."""
        size = 0 if size <= SMALL_BODY_BYTES else size
        try:
            self._memory.make_room(size - self.size, self)
        except HTTPException:
            self.release()
            raise
        self._memory.used += size - self.size
        self.size = size

    def evict(self) -> None:
        """End the arrival of this body, and count it no longer."""
        self._evicted = True
        self._arrival.reschedule(0)
        del self._memory.arriving[self]
        self.release()

    def release(self) -> None:
        """Count this body no longer."""
        self._memory.used -= self.size
        self.size = 0
