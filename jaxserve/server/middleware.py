"""Guards in front of every route, as plain ASGI: the API key, and the size and the time of a request's body."""

import asyncio
import hmac
from collections.abc import Iterable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.errors import error_response

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})  # for probes and scrapers


class ApiKeyGuard:
    """Lets requests pass that carry `Authorization: Bearer <key>` with one of the keys."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]):
        self.app = app
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The path is scope's: one put together from the Host header could be forged.
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._allows(scope):
            await self.app(scope, receive, send)
            return
        headers = {"www-authenticate": "Bearer", "connection": "close"}  # the body is not read
        error = HTTPException(401, "a valid API key is needed: Authorization: Bearer <key>", headers)
        await error_response(error)(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        """Compares bytes, all keys, and in constant time."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        matches = [hmac.compare_digest(token.strip(), key) for key in self._keys]
        return any(matches)


class BodyLimit:
    """Receives a request's body before the app does: at most `max_bytes` of it, within `timeout` seconds."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout: float):
        self.app = app
        self._max_bytes = max_bytes
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._check_announced(scope)
            async with asyncio.timeout(self._timeout):
                body = await self._read(receive)
        except TimeoutError:
            error = HTTPException(408, f"the body did not arrive within {self._timeout:g} s", {"connection": "close"})
            await error_response(error)(scope, receive, send)
        except HTTPException as error:
            await error_response(error)(scope, receive, send)
        else:
            if body is not None:
                await self.app(scope, _replay(body, receive), send)

    def _check_announced(self, scope: Scope) -> None:
        for name, value in scope["headers"]:
            if name == b"content-length" and (not value.isdigit() or int(value[:20]) > self._max_bytes):
                raise self._too_large()

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body, or None if the client went away."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> HTTPException:
        return HTTPException(
            413, f"the body is larger than {self._max_bytes} bytes (max_body_mb)", {"connection": "close"}
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body at once, then what still comes: the disconnect."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
