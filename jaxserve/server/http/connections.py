"""HTTP connections: accepting them, limiting their number and idle time, and closing them without losing answers.

This replaces four behaviours of uvicorn. It lets a client keep a connection without ever sending a request. It parses
everything that has arrived without a pause for other connections. It closes a connection while the client is still
sending, whereupon the client's system discards the answer. It closes a connection when the client has sent all that it
will send, although the answer is to come. In addition, uvloop accepts as many connections as it finds
and resets those for which no file descriptor is left.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxserve.server.errors import MAX_VALUE_LENGTH, ErrorResponse, response_parts
from jaxserve.server.http.auth import PROBES
from jaxserve.server.http.half_closed import EarlyBeginning
from jaxserve.server.http.json_text import to_json
from jaxserve.server.http.tls import Certificates

logger = logging.getLogger(__name__)

# A closing connection is read for at most this time and this number of bytes after the answer.
LINGER_SECONDS = 10.0
LINGER_BYTES = 256 * 1024 * 1024
# After this time a connection without a request may be closed to make room for another.
IDLE_SECONDS = 1.0
# The same for one above the limit when no file descriptor is left: health checks must get in within a second.
SURPLUS_IDLE_SECONDS = 0.5
LOG_INTERVAL = 60.0  # seconds between two warnings
# Bytes of one connection that are parsed before other connections have their turn.
SLICE_BYTES = 32 * 1024
MAX_HEAD_BYTES = 64 * 1024  # of the request line and the headers, with the empty line at their end
ACCEPTED_AT_ONCE = 16  # connections per event of the loop
ACCEPT_PAUSE = 0.1  # seconds until the next attempt if a connection cannot be accepted
TLS_RECORD = b"\x16\x03"  # the beginning of a client's first message in TLS
HANDSHAKE_SECONDS = 10.0  # within which a connection must have agreed on TLS
GOODBYE_SECONDS = 0.25  # that an idle client gets to answer the end of TLS when the server ends


class Connections:
    """The limits that all connections share, and the idle connections, oldest first."""

    def __init__(self, header_timeout: float, limit: int):
        self.header_timeout = header_timeout  # seconds
        self.idle: dict[HttpProtocol, float] = {}  # time since when each waits for a request
        self.limit = limit
        self._next_log = 0.0

    def admit(self, count: int, now: float) -> bool:
        """Return whether a new connection, the `count`-th open one, may send requests.

        Above the limit, close the connection that has been idle longest, if it has been so for `IDLE_SECONDS`.
        """
        if count <= self.limit:
            return True
        oldest = next(iter(self.idle), None)
        room = oldest is not None and now - self.idle[oldest] >= IDLE_SECONDS
        if now >= self._next_log:
            self._next_log = now + LOG_INTERVAL
            action = "closing idle connections" if room else "answering new connections with 503"
            logger.warning("%d connections are open, the limit is %d (ulimit -n): %s", count, self.limit, action)
        if room and oldest is not None:
            self._close(oldest)
        return room

    def close_idle(self, count: int, now: float) -> None:
        """Close connections above the limit that have sent no request for `SURPLUS_IDLE_SECONDS`.

        Called when no file descriptor is left, with the number of open connections. Otherwise many silent connections
        that arrive at once would keep others out until the header timeout. Connections below the limit stay, since
        their requests would be served.
        """
        excess = min(max(count - self.limit, 0), ACCEPTED_AT_ONCE)
        old = [idle for idle, since in self.idle.items() if idle.refused and now - since >= SURPLUS_IDLE_SECONDS]
        for connection in old[:excess]:
            self._close(connection)

    def _close(self, connection: "HttpProtocol") -> None:
        connection.close_idle()
        self.idle.pop(connection, None)


class LingeringTransport:
    """A transport that goes on reading for a moment when it is closed while the client is still sending.

    If it closed at once, the system would answer the remaining bytes with a reset, and the client would lose the
    response.
    """

    def __init__(self, transport: asyncio.Transport, conn: h11.Connection):
        self.lingering = False
        # Set when more data may arrive although h11 is not receiving a body.
        self.unread = False
        self.ended = False  # the client has said that it sends nothing more
        self.write = transport.write
        self._transport = transport
        self._conn = conn
        self._paused = self._held = False
        self._reading = True
        self._discarded = 0
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
        """Stop reading, whatever uvicorn wants, while `held` is true."""
        self._read(paused=self._paused, held=held)

    def _read(self, *, paused: bool, held: bool) -> None:
        self._paused, self._held = paused, held
        reading = not (paused or held)
        if reading != self._reading and not self._transport.is_closing():
            self._reading = reading
            (self._transport.resume_reading if reading else self._transport.pause_reading)()

    def close(self) -> None:
        """Close the connection, at once if the client is not sending or this is the second call."""
        unread = not self.ended and (self.unread or self._conn.their_state in (h11.SEND_BODY, h11.ERROR))
        if not unread or self.is_closing():
            self._transport.close()
            return
        self.lingering = True
        if self._transport.can_write_eof():  # not with TLS, where the client knows the end by the length of the answer
            self._transport.write_eof()
        self._read(paused=False, held=False)
        self._timer = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._transport.close)

    def discard(self, data: bytes) -> None:
        """Ignore data that arrives while lingering, and close after `LINGER_BYTES`."""
        self._discarded += len(data)
        if self._discarded > LINGER_BYTES:
            self._transport.close()

    def cancel_timer(self) -> None:
        """Cancel the timer that ends lingering."""
        if self._timer is not None:
            self._timer.cancel()


class HttpProtocol(H11Protocol):
    """One HTTP/1.1 connection, which must deliver the head of each request within `header_timeout` seconds."""

    transport: LingeringTransport  # type: ignore[assignment]

    def __init__(self, *args: Any, shared: Connections, **options: Any):
        super().__init__(*args, **options)
        self._shared = shared
        self._deadline: asyncio.TimerHandle | None = None
        self.refused = False  # True if the connection gets 503, because too many are open
        self._begin = b""  # of everything received
        self._backlog = bytearray()  # received and not yet parsed
        self._next_slice: asyncio.Handle | None = None
        self._half_closed = False  # the client will send nothing more
        self._early: EarlyBeginning | None = None  # of the answer to a client that has closed its half
        self._handshaking: socket.socket | None = None  # the socket, until the client has agreed on TLS

    @contextlib.contextmanager
    def handshake(self, connection: socket.socket) -> Iterator[None]:
        """Count this connection among the open and the idle ones while it agrees with the client on TLS."""
        self._handshaking = connection
        self.connections.add(self)
        self.refused = not self._shared.admit(len(self.connections), self.loop.time())
        self._shared.idle[self] = self.loop.time()
        try:
            yield
        finally:
            if self._handshaking is not None:  # it failed
                self._shared.idle.pop(self, None)
                self.connections.discard(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._handshaking = None
        self._shared.idle.pop(self, None)
        super().connection_made(LingeringTransport(transport, self.conn))  # type: ignore[arg-type]
        self.refused = not self._shared.admit(len(self.connections), self.loop.time())
        if self.refused:
            self.app = _refuse_requests(self.app, self._shared.limit)
        self._start_head_timer()

    def close_idle(self) -> None:
        """Close the connection, which has sent no request or has got its answer."""
        if self._handshaking is None:
            self.timeout_keep_alive_handler()
        else:
            with contextlib.suppress(OSError):
                self._handshaking.shutdown(socket.SHUT_RDWR)

    def shutdown(self) -> None:
        """Close the connection, when the server ends, as soon as it is idle."""
        if self._handshaking is not None:
            self.close_idle()
            return
        super().shutdown()
        if self.transport.is_closing() and self.scheme == "https":
            self.loop.call_later(GOODBYE_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._backlog.clear()
        self.transport.cancel_timer()
        if self._early is not None:
            self._early.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for the answer to a whole request. Return False, which closes it, if there is none."""
        self.transport.ended = True
        self._half_closed = self.transport.can_write_eof() and self._is_answering() and not self.transport.is_closing()
        waits = self._half_closed and not self.cycle.response_started
        if waits and (self._early is None or not self._early.pending):  # the end may be read twice
            self._early = EarlyBeginning(self.transport)
        return self._half_closed

    def _is_answering(self) -> bool:
        """Return whether a request has arrived as a whole whose response is not complete."""
        whole = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        return whole and self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        self._begin = self._begin or data[: len(TLS_RECORD)]
        if self.transport.lingering:
            self.transport.discard(data)
        elif not self._backlog and len(data) <= self._slice_size() and not self._has_pipelined_requests():
            self._parse(data)
        else:
            self._backlog += data
            self.transport.hold(True)
            self._schedule_slice()

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_head_timer()
        elif self._deadline is None:
            self._start_head_timer()

    def _parse_slice(self) -> None:
        self._next_slice = None
        if self._has_pipelined_requests():
            return  # on_response_complete schedules the next slice
        size = self._slice_size()
        data = bytes(self._backlog[:size])
        del self._backlog[:size]
        if data and not self.transport.is_closing():
            self._parse(data)
        if self.transport.is_closing():
            self._backlog.clear()
        if self._backlog:
            self._schedule_slice()
        else:
            self.transport.hold(False)

    def _schedule_slice(self) -> None:
        if self._next_slice is None:
            self._next_slice = self.loop.call_soon(self._parse_slice)

    def _slice_size(self) -> int:
        """Return the number of bytes to parse next. A head is never given to h11 beyond the limit.

        h11 limits incomplete heads alone, and would take a longer one whose end has arrived.
        """
        if self.conn.their_state is not h11.IDLE:
            return SLICE_BYTES
        return max(1, min(SLICE_BYTES, MAX_HEAD_BYTES - len(self.conn.trailing_data[0])))

    def _has_pipelined_requests(self) -> bool:
        """Return whether the client has sent many requests while one is being answered."""
        return self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) > SLICE_BYTES

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed and not self.transport.is_closing() and not self.eof_received():
            self.transport.close()
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._shared.idle[self] = self.loop.time()
        if self._backlog:
            self._schedule_slice()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not valid HTTP. uvicorn calls this while it handles h11's error."""
        error = sys.exception()
        if not isinstance(error, h11.RemoteProtocolError):
            self._refuse(HTTPException(400, f"not a valid HTTP request: {msg}"))
        elif error.error_status_hint == 431:
            message = f"the head of the request has more than {MAX_HEAD_BYTES} bytes, which is the limit"
            self._refuse(HTTPException(431, message))
        elif self._begin.startswith(TLS_RECORD):
            self._refuse(HTTPException(400, "this looks like TLS, but the server speaks plain HTTP: use http://"))
        else:
            self._refuse(HTTPException(400, f"not a valid HTTP request: {str(error)[:MAX_VALUE_LENGTH]}"))

    def _start_head_timer(self) -> None:
        self._shared.idle.setdefault(self, self.loop.time())
        self._deadline = self.loop.call_later(self._shared.header_timeout, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        self._shared.idle.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_head_timeout(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.trailing_data[0]:
            seconds = f"{self._shared.header_timeout:g} s (--header-timeout)"
            self._refuse(HTTPException(408, f"the head of the request did not arrive within {seconds}"))
        else:
            self.timeout_keep_alive_handler()

    def _refuse(self, error: HTTPException) -> None:
        """Answer a malformed or incomplete request with an error, and close."""
        status, body, _ = response_parts(error)
        data = to_json(body)
        headers = [("content-type", "application/json"), ("content-length", str(len(data))), ("connection", "close")]
        reason = HTTPStatus(status).phrase.encode()
        response = h11.Response(status_code=status, headers=headers, reason=reason)
        for event in (response, h11.Data(data=data), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.unread = True
        self.transport.close()


def _refuse_requests(app: Any, limit: int) -> Any:
    """Return an app that passes probes on to `app` and answers everything else with 503."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBES:
            await app(scope, receive, send)
            return
        headers = {"retry-after": "1", "connection": "close"}
        message = f"too many connections are open: the server's limit is {limit} (ulimit -n); try again later"
        error = HTTPException(503, message, headers)
        await ErrorResponse(error)(scope, receive, send)

    return refuse


class Acceptor:
    """Accepts connections of a listening socket, a few at a time, so that refused ones can end in between.

    When no file descriptor is left, connections wait in the system's queue. This class has the methods of
    `asyncio.Server` that uvicorn calls.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], HttpProtocol],
        make_room: Callable[[], None] = lambda: None,
        tls: Certificates | None = None,
    ):
        """Accept connections of `listener`, with TLS if `tls` is given.

        Call `make_room` whenever no file descriptor is left.
        """
        self._listener = listener
        self._make_room = make_room
        self._tls = tls
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._next_log = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Stop accepting connections."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        """Wait until every accepted socket has become a connection."""
        await asyncio.gather(*self._tasks)

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file descriptor or no memory is left
                self._pause_accepting(error)
                return
            task = self._loop.create_task(self._serve(connection))
            # The event loop itself keeps only a weak reference.
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _pause_accepting(self, error: OSError) -> None:
        now = self._loop.time()
        if now >= self._next_log:
            self._next_log = now + LOG_INTERVAL
            logger.error("cannot accept connections, which wait meanwhile: %s", error)
        self._make_room()
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(ACCEPT_PAUSE, self._resume)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                await self._loop.connect_accepted_socket(self._protocol, connection)
            else:
                await self._agree_on_tls(connection, self._tls.context)
        except OSError:  # the connection has ended meanwhile
            with contextlib.suppress(OSError):
                connection.close()

    async def _agree_on_tls(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        protocol = self._protocol()
        with protocol.handshake(connection):
            await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=context, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )


class HttpServer(uvicorn.Server):
    """A uvicorn server that accepts connections with `Acceptor`, with TLS if it has certificates."""

    def __init__(self, config: uvicorn.Config, tls: Certificates | None = None):
        super().__init__(config)
        self._tls = tls
        self._following: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        acceptors = [Acceptor(listener, self._protocol, self._close_idle, self._tls) for listener in sockets or ()]
        self.servers = acceptors  # type: ignore[assignment]
        if self._tls is not None:
            self._following = asyncio.create_task(self._tls.follow_files())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._following is not None:
            self._following.cancel()
        await super().shutdown(sockets)

    def _close_idle(self) -> None:
        shared: Connections = self.config.http_protocol_class.keywords["shared"]  # type: ignore[union-attr]
        shared.close_idle(len(self.server_state.connections), asyncio.get_running_loop().time())

    def _protocol(self) -> HttpProtocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg, return-value]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
