"""ASGI middleware that normalizes requests before any guard or route sees them."""

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.logs import request_id

REQUEST_ID = b"x-request-id"
STATUS = "status"  # in the state of a request: that of its response
MAX_REQUEST_ID = 128  # characters
PRINTABLE_ID = re.compile(rb"[\x21-\x7e]{1,%d}" % MAX_REQUEST_ID)
# The beginning of a target that is a whole URL, which servers must accept (RFC 9112, section 3.2.2).
AUTHORITY = re.compile("https?://[^/]*", re.IGNORECASE)


class TidyPath:
    """Middleware that reduces targets to paths without the host, the proxy's prefix, and doubled or trailing slashes.

    A redirect might lead to a wrong address behind a proxy. The prefix is removed as often as it occurs: the router
    would remove it again, and would then see another path than the guards.
    """

    def __init__(self, app: ASGIApp, root_path: str):
        self.app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": self._tidy(scope["path"]), "root_path": self._root}
        await self.app(scope, receive, send)

    def _tidy(self, path: str) -> str:
        if not path.startswith("/"):
            path = AUTHORITY.sub("", path, count=1)
        path = re.sub("/{2,}", "/", path)
        while self._root and f"{path}/".startswith(f"{self._root}/"):
            path = path.removeprefix(self._root)
        return path.rstrip("/") or "/"


class HeadAsGet:
    """Middleware that answers HEAD like GET without the body, and also ends endless streams."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        ended = False

        async def send_head(message: Message) -> None:
            nonlocal ended
            if message["type"] == "http.response.start":
                await send(message)
            elif not ended:
                # The end of the response reaches the app as a disconnect, which ends its stream.
                ended = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self.app({**scope, "method": "GET"}, receive, send_head)


class RequestId:
    """Middleware that gives each request an id, which its response and its lines in the log have.

    It is the client's own X-Request-Id, else that of the answer, else a new one. The middleware also notes the status
    of the response for `CountRequests`, since each further one that looks at every part of a stream takes time.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sent = [value for name, value in scope["headers"] if name == REQUEST_ID]
        given = sent[0] if len(sent) == 1 and PRINTABLE_ID.fullmatch(sent[0]) else None
        id = given or f"req_{uuid.uuid4().hex}".encode()
        request_id.set(id.decode())
        noted = scope.setdefault("state", {})  # shared by all copies of the scope

        async def send_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                noted[STATUS] = message["status"]
                headers = message.get("headers", [])
                own = next((value for name, value in headers if name == REQUEST_ID), None)
                if given is None and own is not None:
                    request_id.set(own.decode("latin-1"))
                else:
                    others = [header for header in headers if header[0] != REQUEST_ID]
                    message = {**message, "headers": [*others, (REQUEST_ID, id)]}
            await send(message)

        await self.app(scope, receive, send_id)
