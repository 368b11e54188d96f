"""Error responses in OpenAI's envelope: {"error": {"message", "type", "param", "code", "value", "limit"}}.

At the paths of Anthropic's API they have Anthropic's envelope (`messages_errors`).
"""

import contextlib
import logging
import math
import re
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.core.errors import (
    EngineFailed,
    EngineStopped,
    JaxserveError,
    NonFiniteOutput,
    PlanError,
    QueueFull,
    RequestError,
)
from jaxserve.server.http.auth import is_for_operators
from jaxserve.server.http.json_text import plain_json, to_json
from jaxserve.server.messages.errors import is_anthropic, messages_error, new_request_id
from jaxserve.server.unknown_paths import hint

logger = logging.getLogger(__name__)

MAX_VALUE_LENGTH = 200  # characters of an offending value that an error repeats
MAX_MESSAGE_LENGTH = 2000  # characters
# nginx's status for a client that has gone away. Only the access log shows it.
CLIENT_CLOSED = 499
# After this time another replica, or this one after a restart, may answer.
RETRY_AFTER_STOP = 5.0  # seconds
CODES = {
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    409: "conflict",
    413: "body_too_large",
    415: "unsupported_media_type",
    431: "head_too_large",
    500: "internal_error",
    503: "unavailable",
}
# OpenAI's code for an error by pydantic's type of it.
VALIDATION_CODES = {"missing": "missing_required_parameter"}
# Allowed values by pydantic's type of an error, which may have context for the braces.
ALLOWED = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "less_than_equal": "at most {le}",
    "greater_than_equal": "at least {ge}",
    "literal_error": "{expected}",
    "union": "{what}",
    "string_too_long": "at most {max_length}",
    "string_too_short": "at least {min_length}",
    "too_long": "at most {max_length}",
    "too_short": "at least {min_length}",
}
SIZED = frozenset({"string_too_long", "string_too_short", "too_long", "too_short"})
BOUNDS = ("le", "ge", "max_length", "min_length")  # the keys of the limit in the context of an error
OF_KEY = ".[key]"  # how pydantic says that the error is in the name of an entry
MAX_SHOWN = 60  # characters of a value in the message of a validation error

MAX_TOKENS = re.compile(r"(?<![\w.])max_tokens(?!\w)")

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = MAX_VALUE_LENGTH


class ClientGone(Exception):
    """Raised when a client disconnects before its response is ready."""


@contextlib.contextmanager
def rename_error_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Replace field names in `RequestError`s that leave the block: `names` maps the engine's names to the client's."""
    try:
        yield
    except RequestError as error:
        rename_max_tokens(error, names.get("max_tokens", "max_tokens"))
        if (name := names.get(error.field or "")) is not None:
            rename_field(error, name)
        raise


def rename_field(error: RequestError, name: str) -> None:
    """Replace the name of the field that an error is about."""
    message, field = str(error), error.field or ""
    if field and re.match(rf"{re.escape(field)}(?![\w.]\w)", message):
        error.args = (name + message.removeprefix(field),)
    error.field = name or None


def rename_max_tokens(error: RequestError, name: str) -> None:
    """Replace `max_tokens` wherever an error mentions it, since it is the limit of other fields."""
    error.args = (MAX_TOKENS.sub(name, str(error)),)
    if isinstance(error.limit, str):
        error.limit = MAX_TOKENS.sub(name, error.limit)


def envelope(
    message: str,
    status: int,
    *,
    param: str | None = None,
    code: str | None = None,
    value: Any = None,
    limit: Any = None,
) -> dict[str, Any]:
    """Return the body of an error response, which is also the data of an error event in a stream."""
    error: dict[str, Any] = {
        "message": message[:MAX_MESSAGE_LENGTH],
        "type": "invalid_request_error" if status < 500 else "server_error",
        "param": param if param is None else param[:MAX_VALUE_LENGTH],
        "code": code or CODES.get(status, "invalid_value" if param else "invalid_request"),
    }
    if value is not None:
        error["value"] = _shortened(value)
    if limit is not None:
        error["limit"] = _shortened(limit)
    return {"error": error}


def response_parts(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return (status, body, headers) for an error. The message of an unexpected exception is not included."""
    match error:
        case QueueFull():
            headers = {"retry-after": str(max(1, math.ceil(error.retry_after)))}
            return 503, _request_envelope(error), headers
        case RequestError():
            return error.status, _request_envelope(error), {}
        case PlanError():
            return error.status, envelope(str(error), error.status, param="plan"), {}
        case EngineStopped():
            return 503, envelope(str(error), 503), {"retry-after": str(math.ceil(RETRY_AFTER_STOP))}
        case EngineFailed():
            return 500, envelope(f"the engine failed: {error}", 500, code="engine_failed"), {}
        case NonFiniteOutput():
            return 500, envelope(str(error), 500, code="non_finite_output"), {}
        case HTTPException():
            return error.status_code, envelope(str(error.detail), error.status_code), dict(error.headers or {})
        case JaxserveError():
            return 500, envelope(str(error), 500), {}
    body = envelope("internal error: see the server's log for details", 500)
    # uvicorn cuts the connection after a bug: the header keeps clients from using it again.
    return 500, body, {"connection": "close"}


class ErrorResponse(Response):
    """The HTTP response that reports an error, in the form of the API that was asked."""

    def __init__(self, error: Exception):
        self._openai = status, body, headers = response_parts(error)
        super().__init__(_written(body), status, headers, media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_anthropic(scope):
            await super().__call__(scope, receive, send)
            return
        status, body, headers = self._openai
        request_id = new_request_id()
        status, body = messages_error(status, body, request_id)
        headers = {**headers, "request-id": request_id}
        await Response(_written(body), status, headers, media_type="application/json")(scope, receive, send)


def _written(body: Mapping[str, Any]) -> bytes:
    """Return the body of an error as JSON, also if the usual writer is what has failed."""
    try:
        return to_json(body)
    except Exception:
        return plain_json(body)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response, without FastAPI's slower serialization by a model."""
    return Response(to_json(body), status, headers, media_type="application/json")


def install_handlers(app: FastAPI) -> None:
    """Make the app answer every error that leaves a route with an envelope."""

    async def on_error(request: Request, error: Exception) -> Response:
        response = ErrorResponse(_with_hint(error, request))
        client = request.app.state.server.loaded
        if response.status_code == 400 and client is not None and not is_for_operators(request.scope["path"]):
            client.count_rejection("invalid")
        return response

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await on_error(request, _first_validation_error(error))

    async def on_gone(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(ClientGone, on_gone)
    for kind in (JaxserveError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)


def _with_hint(error: Exception, request: Request) -> Exception:
    """Add the path and the alternatives to a 404 or 405 of the router. Return other errors unchanged."""
    path = request.scope["path"][:MAX_VALUE_LENGTH]
    match error:
        case HTTPException(status_code=404, detail="Not Found"):
            return HTTPException(404, f"unknown path {path!r}: {hint(path, request.app.state.endpoints)}")
        case HTTPException(status_code=405):
            methods = {method.strip() for method in (error.headers or {}).get("Allow", "").split(",")}
            allowed = ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
            message = f"method {request.method} is not allowed at {path!r}: choose from {allowed}"
            return HTTPException(405, message, {"allow": allowed})
    return error


def _request_envelope(error: RequestError) -> dict[str, Any]:
    return envelope(str(error), error.status, param=error.field, code=error.code, value=error.value, limit=error.limit)


def _first_validation_error(error: RequestValidationError) -> RequestError:
    """Return the first validation error of a body, with the path of its field."""
    first = error.errors()[0]
    place, *path = first["loc"]
    field = ".".join(str(part) for part in (path if place in ("body", "query") else first["loc"])) or None
    message = _validation_message(field or "the body", first)
    # Of a missing field, pydantic reports the object that lacks it.
    given = None if first["type"] == "missing" else first.get("input")
    value = len(given) if _is_sized(first) else _shortened(given)
    limit = next((bound for name in BOUNDS if (bound := first.get("ctx", {}).get(name)) is not None), None)
    error = RequestError(message, field=field and field.removesuffix(OF_KEY), value=value, limit=limit)
    error.code = VALIDATION_CODES.get(first["type"])
    return error


def _validation_message(name: str, error: Mapping[str, Any]) -> str:
    """Return what was given for a field, and what is allowed, instead of pydantic's text."""
    kind, given = error["type"], error.get("input")
    if kind == "missing":
        return f"{name} is missing"
    if kind not in ALLOWED:
        return f"{name}: {error['msg']}"
    allowed = ALLOWED[kind].format(**error.get("ctx", {}))
    if _is_sized(error):
        unit = "characters" if isinstance(given, str) else "entries"
        if name.endswith(OF_KEY):
            name = f"{name.split('.')[0]}: the name of an entry"
        return f"{name} has {len(given)} {unit}: it must have {allowed}"
    return f"{name} is {_in_json(given)}: it must be {allowed}"


def _is_sized(error: Mapping[str, Any]) -> bool:
    """Return whether a validation error is about the length of a text, a list or an object."""
    return error["type"] in SIZED and isinstance(error.get("input"), (str, list, dict))


def _in_json(value: Any) -> str:
    """Return a value as JSON for a message, or only the kind of a long one."""
    text = to_json(value).decode() if isinstance(value, (str, int, float, type(None))) else ""
    if text and len(text) <= MAX_SHOWN:
        return text
    kinds = {str: "a string", list: "a list", dict: "an object", int: "a large integer"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "a value")


def _shortened(value: Any) -> Any:
    """Return a value as short JSON that is safe to repeat in an error."""
    if value is None or (isinstance(value, int) and abs(value) < 2**53):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    text = value if isinstance(value, str) else _REPR.repr(value)
    return text if len(text) <= MAX_VALUE_LENGTH else text[:MAX_VALUE_LENGTH] + "..."
