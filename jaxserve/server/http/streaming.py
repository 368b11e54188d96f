"""Responses that are cancelled when the client disconnects: server-sent events and awaited results."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.core.errors import JaxserveError
from jaxserve.server.errors import ClientGone, response_parts

logger = logging.getLogger(__name__)

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment, which clients ignore

# The standard of server-sent events does not treat these as line ends, but the line iterators of some clients do.
LINE_ENDS = {"\u0085": b"\\u0085", "\u2028": b"\\u2028", "\u2029": b"\\u2029"}


def event(data: Any) -> bytes:
    """Return one server-sent event with `data` as JSON; bytes are JSON already."""
    text = data if isinstance(data, bytes) else to_json(data)
    if b"\xe2\x80" in text or b"\xc2\x85" in text:
        for character, escaped in LINE_ENDS.items():
            text = text.replace(character.encode(), escaped)
    return b"data: " + text + b"\n\n"


def named_event(data: Mapping[str, Any]) -> bytes:
    """Return one server-sent event with `data` as JSON, whose name is the type in it."""
    return b"event: " + data["type"].encode() + b"\n" + event(data)


def _error_values(error: Exception) -> list[Any]:
    return [response_parts(error)[1]]


@dataclass(frozen=True)
class StreamFormat:
    """The form of a stream: of its values, of those that tell of an error, of its end, and of what fills silence."""

    write: Callable[[Any], bytes] = event
    errors: Callable[[Exception], Iterable[Any]] = _error_values
    end: bytes = DONE
    ping: bytes = PING


COMPLETIONS = StreamFormat()


async def disconnected(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client disconnects, cancel it and raise ClientGone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _cancel(watch)
        await _cancel(task)


async def _cancel(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, JaxserveError):
            await task


class EventStream(Response):
    """A response of server-sent events from a generator of JSON values, whose end is sent even after an error.

    `start` waits at most one ping interval for the first value, so that a request refused by then gets its proper
    status. A later error becomes an event. After each interval without an event a ping is sent, since proxies and
    clients might otherwise take the connection for dead. The generator is closed when the client disconnects.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: asyncio.Future[list[Any]],
        rest: AsyncGenerator[Any, None],
        headers: Mapping[str, str],
        ping_interval: float,
        form: StreamFormat,
    ):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._first, self._rest, self._format = first, rest, form
        self._ping_interval = ping_interval  # seconds
        self._silent = True  # no event since the last check of `_ping`

    @classmethod
    async def start(
        cls,
        request: Request,
        values: AsyncGenerator[Any, None],
        headers: Mapping[str, str],
        form: StreamFormat = COMPLETIONS,
    ) -> "EventStream":
        """Return the stream once the first value has arrived, or after one ping interval.

        Raise an error of the generator that occurs by then, or ClientGone if the client disconnects.
        """
        interval = request.app.state.server.settings.sse_ping_interval
        first = asyncio.ensure_future(_first_of(values))
        try:
            await while_connected(request, asyncio.wait((first,), timeout=interval))
            if first.done():
                first.result()
        except BaseException:
            await _cancel(first)
            await values.aclose()
            raise
        return cls(first, values, headers, interval, form)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._rest):
            sending = asyncio.ensure_future(self._send_all(send))
            watch = asyncio.ensure_future(disconnected(receive))
            try:
                await asyncio.wait((sending, watch), return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
            finally:
                await _cancel(sending)
                await _cancel(watch)
                await _cancel(self._first)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if not self._first.done():
            await _send_part(send, self._format.ping)
        pings = asyncio.ensure_future(self._ping(send))
        try:
            for value in await self._first:
                await self._send_event(send, value)
            async for value in self._rest:
                await self._send_event(send, value)
        except Exception as error:
            if not isinstance(error, JaxserveError):
                logger.exception("a stream failed")
            for value in self._format.errors(error):
                await self._send_event(send, value)
        finally:
            await _cancel(pings)
        await send({"type": "http.response.body", "body": self._format.end, "more_body": False})

    async def _send_event(self, send: Send, value: Any) -> None:
        self._silent = False
        await _send_part(send, self._format.write(value))

    async def _ping(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._ping_interval)
            if self._silent:
                await _send_part(send, self._format.ping)
            self._silent = True


async def _send_part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _first_of(values: AsyncGenerator[T, None]) -> list[T]:
    """Return the first value, none if there is none."""
    async for value in values:
        return [value]
    return []
