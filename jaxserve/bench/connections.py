"""Connections that are kept open between requests, at a cost that does not grow with their number."""

from collections.abc import AsyncIterator, Callable
from typing import cast

import httpx

KEEP_ALIVE_S = 2.0  # idle for longer: closed; servers close theirs after 5 s or more, perhaps just as we write


class Connections(httpx.AsyncBaseTransport):
    """One connection for every request in flight; one that has become free serves the next request.

    httpx's own pool looks at all connections whenever a request begins or ends, and does so for each idle one again:
    with some hundreds of them that takes milliseconds, in which no arrival is sent and no token is timed.
    """

    def __init__(self) -> None:
        self._ssl = httpx.create_ssl_context(trust_env=False)
        self._free: list[httpx.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Sends a request on a free connection, or on a new one."""
        connection = self._free.pop() if self._free else self._new()
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            self._free.append(connection)  # its socket is closed, it will open another
            raise
        stream = _Stream(cast(httpx.AsyncByteStream, response.stream), lambda: self._free.append(connection))
        return httpx.Response(response.status_code, headers=response.headers, stream=stream)

    async def aclose(self) -> None:
        """Closes what is open and free; what is in flight belongs to its request."""
        while self._free:
            await self._free.pop().aclose()

    def _new(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=KEEP_ALIVE_S)
        return httpx.AsyncHTTPTransport(verify=self._ssl, trust_env=False, limits=limits)


class _Stream(httpx.AsyncByteStream):
    """A body that says when it has been read or given up."""

    def __init__(self, stream: httpx.AsyncByteStream, on_close: Callable[[], None]):
        self._stream, self._on_close = stream, on_close

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._stream.__aiter__()

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            self._on_close()
