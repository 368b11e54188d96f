"""Clients that close their writing half after a request, who still get their answer unless they are gone.

On TCP, a client that waits for its answer and one that has closed its connection altogether look alike until something
is written: the system of the latter then resets the connection. Every response begins with the same bytes, whatever
its status, so that the first of them can be written before the answer is known. They are written one by one, and what
is sent of them is left out when the response begins. From then on the parts of a stream, and its pings, show the same.
"""

import asyncio
import select
from typing import Protocol

BEGINNING = b"HTTP/1.1 "  # of every response that h11 writes
CHECK_SECONDS = 0.25  # between two looks at the connection
PROBE_SECONDS = 10.0  # between two bytes of the beginning


class Connection(Protocol):
    """The transport of a connection, whose method `write` can be replaced."""

    def write(self, data: bytes) -> None:
        """Send data."""

    def abort(self) -> None:
        """Close the connection at once, which its protocol learns by `connection_lost`."""

    def get_extra_info(self, name: str) -> object:
        """Return the connection's socket."""


class EarlyBeginning:
    """The beginning of a response that is not known yet, sent byte by byte until the response or a reset comes."""

    def __init__(self, transport: Connection):
        """Send the first byte soon. The next thing that is written to `transport` must be the response."""
        self._transport, self._send = transport, transport.write
        self._socket = transport.get_extra_info("socket")
        self._loop = asyncio.get_running_loop()
        self._sent, self._next = 0, 0.0
        self.pending = True  # until the response begins
        transport.write = self._begin  # type: ignore[method-assign]
        self._timer: asyncio.Handle = self._loop.call_soon(self._check)

    def _check(self) -> None:
        if is_gone(self._socket):
            self._transport.abort()
            return
        now = self._loop.time()
        if now >= self._next and self._sent < len(BEGINNING):
            self._next = now + PROBE_SECONDS
            self._send(BEGINNING[self._sent : self._sent + 1])
            self._sent += 1
        self._timer = self._loop.call_later(CHECK_SECONDS, self._check)

    def _begin(self, data: bytes) -> None:
        """Send the beginning of the response, without the bytes that have been sent."""
        self.cancel()
        self.pending = False
        self._transport.write = self._send  # type: ignore[method-assign]
        assert data.startswith(BEGINNING)
        self._send(data[self._sent :])

    def cancel(self) -> None:
        """Stop to look at the connection."""
        self._timer.cancel()


def is_gone(socket: object) -> bool:
    """Return whether a connection has been reset, or closed in both directions. False where this cannot be known."""
    fileno = getattr(socket, "fileno", None)
    if fileno is None or fileno() < 0 or not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(fileno(), 0)  # errors and the end of both directions are always reported
    return bool(poll.poll(0))
