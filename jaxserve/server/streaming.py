"""Answers that end when the client goes away: server-sent events, and waiting with an eye on the connection."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.core.errors import JaxserveError
from jaxserve.server.errors import ClientGone, describe

logger = logging.getLogger(__name__)

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(data) + b"\n\n"


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. Raises ClientGone then."""
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
    """Server-sent events from a generator of JSON values, then `data: [DONE]`, also after an error.

    The first value is awaited by `start`, before the status is sent, so that a refused request has its proper status.
    When the client goes away the generator is closed, wherever it is.
    """

    media_type = "text/event-stream"

    def __init__(self, first: Any, rest: AsyncGenerator[Any, None], headers: Mapping[str, str]):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    @classmethod
    async def start(
        cls, request: Request, values: AsyncGenerator[Any, None], headers: Mapping[str, str]
    ) -> "EventStream":
        """Waits for the first value. Raises what the generator raises before it, or ClientGone."""
        try:
            first = await while_connected(request, _next(values))
        except BaseException:
            await values.aclose()
            raise
        return cls(first, values, headers)

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

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_part(send, event(self._first))
        try:
            async for value in self._rest:
                await _send_part(send, event(value))
        except Exception as error:
            if not isinstance(error, JaxserveError):
                logger.exception("a stream failed")
            await _send_part(send, event(describe(error)[1]))
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def _send_part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _next(values: AsyncGenerator[T, None]) -> T:
    return await anext(values)
