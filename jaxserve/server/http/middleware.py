"""ASGI middleware that guards every route: keys, and the size and arrival time of a request's body."""

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.errors import ErrorResponse, envelope, json_response
from jaxserve.server.http.auth import has_key, is_for_operators, is_public
from jaxserve.server.http.body import ENCODINGS, body_too_large, decompress
from jaxserve.server.http.body_memory import BodyMemory, HeldBody
from jaxserve.server.http.offload import off_loop
from jaxserve.server.settings import ServerSettings, is_loopback

# For responses that are sent before the body has been read.
CLOSE = {"connection": "close"}


class ApiKeyGuard:
    """Middleware that requires an API key, as `Authorization: Bearer <key>`, `api-key` or `x-api-key`.

    Public paths need no key. `AdminGuard` guards the operators' paths.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]):
        self.app = app
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._allows(scope):
            await self.app(scope, receive, send)
            return
        headers = {"www-authenticate": "Bearer", **CLOSE}
        message = "a valid API key is required: Authorization: Bearer <key> (or the header api-key or x-api-key)"
        error = HTTPException(401, message, headers)
        await ErrorResponse(error)(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        # request.url is built from the Host header, which can be forged.
        path = scope["path"]
        return is_public(path) or is_for_operators(path) or has_key(scope, self._keys)


class AdminGuard:
    """Middleware that requires the admin key at the operators' paths.

    If no admin key is set, a request passes only if nobody else could have sent it: no API key is set either, the
    server listens on this machine alone, and the headers Host and Origin name this machine. A foreign web page may
    have pointed its own name at this machine's address (DNS rebinding), or be one that `cors_origins` allows.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings):
        self.app = app
        self._key = settings.admin_key.encode() if settings.admin_key else None
        self._trusted = settings.local and not settings.api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_for_operators(scope["path"]):
            await self.app(scope, receive, send)
        elif self._key is not None:
            await (self.app if has_key(scope, (self._key,)) else _wrong_admin_key)(scope, receive, send)
        elif not self._trusted:
            message = (
                "without an admin key this path is open only if no API key is set and the server listens on this "
                "machine alone: start it with an admin key (--admin-key or JAXSERVE_ADMIN_KEY)"
            )
            await ErrorResponse(HTTPException(403, message, CLOSE))(scope, receive, send)
        elif not _names_this_machine(scope):
            message = "without an admin key the headers host and origin must name this machine"
            await ErrorResponse(HTTPException(403, message, CLOSE))(scope, receive, send)
        else:
            await self.app(scope, receive, send)


class BodyLimit:
    """Middleware that receives and decompresses a body of at most `max_bytes` within `timeout` seconds.

    All bodies in progress share a `BodyMemory`.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout: float):
        self.app = app
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._memory = BodyMemory(max_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        held = HeldBody(self._memory)
        try:
            try:
                body = await self._body(scope, receive, held)
            except HTTPException as error:
                await ErrorResponse(error)(scope, receive, send)
                return
            if body is not None:
                await self.app(scope, replay(body, receive), send)
        finally:
            held.release()

    async def _body(self, scope: Scope, receive: Receive, held: HeldBody) -> bytes | None:
        """Return the whole body, or None if the client went away. Raise HTTPException if it breaks a limit."""
        self._check_announced(scope)
        encoding = _encoding(scope)
        try:
            async with held.arriving(self._timeout):
                body = await self._read(receive, held)
        except TimeoutError:
            message = f"the body did not arrive within {self._timeout:g} s (--body-timeout)"
            raise HTTPException(408, message, CLOSE) from None
        if body and encoding:
            body = await off_loop(decompress, body, encoding, self._max_bytes)
            held.resize(len(body))
        return body

    def _check_announced(self, scope: Scope) -> None:
        for name, value in scope["headers"]:
            if name == b"content-length" and (not value.isdigit() or int(value[:20]) > self._max_bytes):
                raise body_too_large(self._max_bytes, int(value[:20]) if value.isdigit() else None, CLOSE)

    async def _read(self, receive: Receive, held: HeldBody) -> bytes | None:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_bytes:
                raise body_too_large(self._max_bytes, headers=CLOSE)
            held.resize(size)
            if not message.get("more_body", False):
                return b"".join(parts)


def _encoding(scope: Scope) -> str | None:
    """Return the body's compression, or None. Raise HTTPException if it is unknown."""
    given = b",".join(value for name, value in scope["headers"] if name == b"content-encoding")
    encoding = given.decode("latin-1").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding in ENCODINGS:
        return encoding
    message = f"unknown compression {encoding[:40]!r} (header content-encoding): choose from gzip, deflate"
    raise HTTPException(415, message, {"accept-encoding": "gzip, deflate", **CLOSE})


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the whole body first, and then later messages, such as the disconnect."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def _wrong_admin_key(scope: Scope, receive: Receive, send: Send) -> None:
    body = envelope("the admin key is required: Authorization: Bearer <key>", 401, code="invalid_admin_key")
    await json_response(body, 401, {"www-authenticate": "Bearer", **CLOSE})(scope, receive, send)


def _names_this_machine(scope: Scope) -> bool:
    """Return whether the only Host header, and Origin if present, are loopback names or addresses."""
    hosts = [b"//" + value for name, value in scope["headers"] if name == b"host"]
    origins = [value for name, value in scope["headers"] if name == b"origin"]
    return len(hosts) == 1 and all(_is_local(url) for url in (*hosts, *origins))


def _is_local(url: bytes) -> bool:
    try:
        host = urlsplit(url).hostname
        return host is not None and is_loopback(host.decode("ascii"))
    except ValueError:
        return False
