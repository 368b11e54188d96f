"""HTTP connections: how many there may be, how long they may stay silent, and how they are closed.

uvicorn's own protocol lets a client keep a connection without ever sending a request, and closes one while the client
is still sending, whereupon the client's system throws the answer away.
"""

import asyncio
import logging
from typing import Any

import h11
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxserve.server.access import PROBES
from jaxserve.server.errors import describe, error_response

logger = logging.getLogger(__name__)

LINGER_SECONDS = 10.0  # for which a closing connection is read after the answer
LINGER_BYTES = 256 * 1024 * 1024
IDLE_SECONDS = 1.0  # after which a connection without a request may be closed to make room
LOG_INTERVAL = 60.0  # seconds


class Connections:
    """The connections that wait for a request, oldest first, and the limits that all connections share.

    Mutated by `HttpProtocol`.
    """

    def __init__(self, header_timeout: float, limit: int):
        self.header_timeout = header_timeout  # seconds
        self.idle: dict[HttpProtocol, float] = {}  # since when
        self._limit = limit
        self._next_log = 0.0

    def admit(self, count: int, now: float) -> bool:
        """Return whether one more connection, with which there are `count`, may send a request.

        Beyond the limit, one that has been idle for a while makes room.
        """
        if count <= self._limit:
            return True
        oldest = next(iter(self.idle), None)
        room = oldest is not None and now - self.idle[oldest] >= IDLE_SECONDS
        if now >= self._next_log:
            self._next_log = now + LOG_INTERVAL
            action = "closing the idle ones first" if room else "answering new ones with 503"
            logger.warning("%d connections are open, the limit is %d (ulimit -n): %s", count, self._limit, action)
        if room and oldest is not None:
            oldest.timeout_keep_alive_handler()
            self.idle.pop(oldest, None)
        return room


class LingeringTransport:
    """A transport that goes on reading for a moment when it is closed while the client still sends.

    Closing at once would make the system answer the rest with a reset, and the client would lose what it was told.
    """

    def __init__(self, transport: asyncio.Transport, conn: h11.Connection):
        self.lingering = False
        self.unread = False  # whether there is more to come although no body is being received
        self.write = transport.write
        self._transport = transport
        self._conn = conn
        self._dropped = 0
        self._timer: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.lingering or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection: at once when nothing more is expected or at the second call. Mutates."""
        unread = self.unread or self._conn.their_state in (h11.SEND_BODY, h11.ERROR)
        if not unread or self.is_closing() or not self._transport.can_write_eof():
            self._transport.close()
            return
        self.lingering = True
        self._transport.write_eof()
        self._transport.resume_reading()
        self._timer = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._transport.close)

    def drop(self, data: bytes) -> None:
        """Pass over what still comes. Mutates."""
        self._dropped += len(data)
        if self._dropped > LINGER_BYTES:
            self._transport.close()

    def lost(self) -> None:
        """Forget the timer of a connection that has ended. Mutates."""
        if self._timer is not None:
            self._timer.cancel()


class HttpProtocol(H11Protocol):
    """One connection. The head of a request must come within a time, which no byte of it prolongs."""

    transport: LingeringTransport  # type: ignore[assignment]

    def __init__(self, *args: Any, shared: Connections, **options: Any):
        super().__init__(*args, **options)
        self._shared = shared
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(LingeringTransport(transport, self.conn))  # type: ignore[arg-type]
        if not self._shared.admit(len(self.connections), self.loop.time()):
            self.app = _refused(self.app)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_head()
        self.transport.lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.lingering:
            self.transport.drop(data)
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._has_head()
        elif self._deadline is None:
            self._expect_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._shared.idle[self] = self.loop.time()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPException(400, f"this is not a valid HTTP request: {msg}"))

    def _expect_head(self) -> None:
        self._shared.idle.setdefault(self, self.loop.time())
        self._deadline = self.loop.call_later(self._shared.header_timeout, self._head_is_late)

    def _has_head(self) -> None:
        self._shared.idle.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _head_is_late(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.trailing_data[0]:
            seconds = f"{self._shared.header_timeout:g} s (--header-timeout)"
            self._refuse(HTTPException(408, f"the head of the request did not arrive within {seconds}"))
        else:
            self.timeout_keep_alive_handler()

    def _refuse(self, error: HTTPException) -> None:
        """Answer what is no request, or not yet, and close. Mutates."""
        status, body, _ = describe(error)
        data = to_json(body)
        headers = [("content-type", "application/json"), ("content-length", str(len(data))), ("connection", "close")]
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=data), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.unread = True
        self.transport.close()


def _refused(app: Any) -> Any:
    """Return an app that answers probes, and everything else with 503."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBES:
            await app(scope, receive, send)
            return
        headers = {"retry-after": "1", "connection": "close"}
        error = HTTPException(503, "too many connections are open (the server's limit of open files)", headers)
        await error_response(error)(scope, receive, send)

    return refuse
