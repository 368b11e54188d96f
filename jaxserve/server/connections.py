"""HTTP connections: how they are accepted, how many there may be, how long they may stay silent, how they are closed.

uvicorn's own protocol lets a client keep a connection without ever sending a request, works on whatever has arrived
without a pause, and closes a connection while the client is still sending, whereupon the client's system throws the
answer away. uvloop accepts as many connections as it finds and resets those for which there is no file left.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxserve.server.auth import PROBES
from jaxserve.server.errors import describe, error_response

logger = logging.getLogger(__name__)

LINGER_SECONDS = 10.0  # for which a closing connection is read after the answer
LINGER_BYTES = 256 * 1024 * 1024
IDLE_SECONDS = 1.0  # after which a connection without a request may be closed to make room
LOG_INTERVAL = 60.0  # seconds
SLICE = 32 * 1024  # bytes of one connection that are worked on before others have their turn
ACCEPTED_AT_ONCE = 16  # connections
ACCEPT_PAUSE = 0.1  # seconds after a connection could not be accepted


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
        self._paused = self._held = False
        self._reading = True
        self._dropped = 0
        self._timer: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.lingering or self._transport.is_closing()

    def pause_reading(self) -> None:
        self._read(paused=True, held=self._held)

    def resume_reading(self) -> None:
        self._read(paused=False, held=self._held)

    def hold(self, held: bool) -> None:
        """Read nothing, whatever uvicorn wants, or no longer so. Mutates."""
        self._read(paused=self._paused, held=held)

    def _read(self, *, paused: bool, held: bool) -> None:
        self._paused, self._held = paused, held
        reading = not (paused or held)
        if reading != self._reading and not self._transport.is_closing():
            self._reading = reading
            (self._transport.resume_reading if reading else self._transport.pause_reading)()

    def close(self) -> None:
        """Close the connection: at once when nothing more is expected or at the second call. Mutates."""
        unread = self.unread or self._conn.their_state in (h11.SEND_BODY, h11.ERROR)
        if not unread or self.is_closing() or not self._transport.can_write_eof():
            self._transport.close()
            return
        self.lingering = True
        self._transport.write_eof()
        self._read(paused=False, held=False)
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
        self._backlog = bytearray()  # what has arrived and waits for its turn
        self._turn: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(LingeringTransport(transport, self.conn))  # type: ignore[arg-type]
        if not self._shared.admit(len(self.connections), self.loop.time()):
            self.app = _refused(self.app)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_head()
        self._backlog.clear()
        self.transport.lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.lingering:
            self.transport.drop(data)
        elif not self._backlog and len(data) <= SLICE and not self._is_ahead():
            self._take(data)
        else:
            self._backlog += data
            self.transport.hold(True)
            self._wait_for_turn()

    def _take(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._has_head()
        elif self._deadline is None:
            self._expect_head()

    def _take_slice(self) -> None:
        self._turn = None
        if self._is_ahead():
            return  # until the response is complete
        data = bytes(self._backlog[:SLICE])
        del self._backlog[:SLICE]
        if data and not self.transport.is_closing():
            self._take(data)
        if self.transport.is_closing():
            self._backlog.clear()
        if self._backlog:
            self._wait_for_turn()
        else:
            self.transport.hold(False)

    def _wait_for_turn(self) -> None:
        if self._turn is None:
            self._turn = self.loop.call_soon(self._take_slice)

    def _is_ahead(self) -> bool:
        """Whether the client has sent many requests while one is being answered."""
        return self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) > SLICE

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._shared.idle[self] = self.loop.time()
        if self._backlog:
            self._wait_for_turn()

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


class Acceptor:
    """Takes connections from a listening socket, a few at a time, so that those which are refused end in between.

    When there is no file left for one, the others wait in the system's queue. Has the methods of `asyncio.Server` that
    uvicorn calls.
    """

    def __init__(self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol]):
        self._listener = listener
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._next_log = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more. Mutates."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        """Return when everything that was accepted is a connection."""
        await asyncio.gather(*self._tasks)

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file or no memory is left
                self._wait_for_room(error)
                return
            task = self._loop.create_task(self._serve(connection))
            self._tasks.add(task)  # the loop itself keeps only a weak reference
            task.add_done_callback(self._tasks.discard)

    def _wait_for_room(self, error: OSError) -> None:
        now = self._loop.time()
        if now >= self._next_log:
            self._next_log = now + LOG_INTERVAL
            logger.error("cannot accept connections, they wait: %s", error)
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(ACCEPT_PAUSE, self._resume)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:  # it has ended meanwhile
            with contextlib.suppress(OSError):
                connection.close()


class HttpServer(uvicorn.Server):
    """A uvicorn server that accepts connections as `Acceptor` does."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self.servers = [Acceptor(listener, self._protocol) for listener in sockets or ()]  # type: ignore[misc]

    def _protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
