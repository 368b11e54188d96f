"""Responses that are cancelled when the client disconnects: server-sent events and awaited results."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.core.errors import JaxserveError
from jaxserve.server.errors import ClientGone, response_parts
from jaxserve.server.http.json_text import plain_json, to_json

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


def plain_event(data: Mapping[str, Any]) -> bytes:
    """Return one server-sent event, named if `data` has a type, by a writer of JSON that knows a text for any value."""
    text = event(plain_json(data))
    return b"event: " + data["type"].encode() + b"\n" + text if "type" in data else text


def _error_values(error: Exception) -> list[Any]:
    return [response_parts(error)[1]]


@dataclass(frozen=True)
class StreamFormat:
    """The form of a stream: of its values, of those that tell of an error, of its end, and of what fills silence."""

    write: Callable[[Any], bytes] = event
    errors: Callable[[Exception], Iterable[Any]] = _error_values
    end: bytes = DONE
    ping: bytes = PING

    def failure(self, error: Exception) -> list[bytes]:
        """Return the last events of a stream that an error ends, also if the error cannot be shown."""
        try:
            return [self.write(value) for value in self.errors(error)]
        except Exception:
            logger.exception("the error of a stream cannot be shown")
            return [plain_event(value) for value in self.errors(RuntimeError())]


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
        if not task.done():
            raise ClientGone
        if task.cancelled():
            raise RuntimeError("a request was cancelled by the server itself")
        return task.result()
    finally:
        await _cancel(watch)
        await _cancel(task)


def failure_of(error: BaseException, what: str) -> Exception:
    """Return the failure that an error means for the current task, and log one that is a bug.

    Raise the error again if the task itself has been cancelled.
    """
    if isinstance(error, JaxserveError):
        return error
    task = asyncio.current_task()
    if not isinstance(error, Exception) and (task is None or task.cancelling()):
        raise error
    logger.error("%s failed", what, exc_info=error)
    return error if isinstance(error, Exception) else RuntimeError(f"{what} was cancelled by the server itself")


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
        except (Exception, asyncio.CancelledError) as error:
            failure = failure_of(error, "a stream")
            for part in self._format.failure(failure):
                await _send_part(send, part)
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
