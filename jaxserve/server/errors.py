"""Errors as OpenAI's envelope: {"error": {"message", "type", "param", "code", "value", "limit"}}."""

import contextlib
import logging
import math
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response

from jaxserve.core.errors import (
    EngineFailed,
    EngineStopped,
    JaxserveError,
    NonFiniteOutput,
    PlanError,
    QueueFull,
    RequestError,
)
from jaxserve.server.auth import is_for_operators

logger = logging.getLogger(__name__)

MAX_VALUE_LENGTH = 200  # characters of an offending value that an error repeats
MAX_MESSAGE_LENGTH = 2000  # characters
CLIENT_CLOSED = 499  # nginx's status for a client that went away; nobody sees it but the access log
RETRY_AFTER_STOP = 5.0  # seconds; another replica, or this one after a restart
CODES = {
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    409: "conflict",
    413: "body_too_large",
    415: "unsupported_media_type",
    500: "internal_error",
    503: "unavailable",
}
VALIDATION_CODES = {"missing": "missing_required_parameter"}  # pydantic's name for an error: OpenAI's


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = MAX_VALUE_LENGTH

# What is served, and what clients of other servers and of other APIs ask for.
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize", "/v1/models")
OTHER_APIS = {
    "/v1/responses": "OpenAI's Responses API",
    "/v1/messages": "Anthropic's Messages API",
    "/v1/rerank": "reranking",
    "/rerank": "reranking",
    "/v1/score": "scoring",
    "/score": "scoring",
    "/v1/moderations": "moderation",
    "/v1/audio": "audio",
    "/v1/images": "images",
    "/v1/files": "files",
    "/v1/batches": "batches",
    "/api": "Ollama's API",
    "/generate": "the API of text-generation-inference",
    "/generate_stream": "the API of text-generation-inference",
}


class ClientGone(Exception):
    """The client disconnected before its answer was ready."""


@contextlib.contextmanager
def rename_error_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Lets `RequestError`s name what the client sent: `names` has that for the engine's fields."""
    try:
        yield
    except RequestError as error:
        if (name := names.get(error.field or "")) is not None:
            message = str(error)
            if message.startswith(f"{error.field} "):
                error.args = (name + message.removeprefix(error.field or ""),)
            error.field = name
        raise


def envelope(
    message: str,
    status: int,
    *,
    param: str | None = None,
    code: str | None = None,
    value: Any = None,
    limit: Any = None,
) -> dict[str, Any]:
    """The body of an error response, and the data of an error event in a stream."""
    error: dict[str, Any] = {
        "message": message[:MAX_MESSAGE_LENGTH],
        "type": "invalid_request_error" if status < 500 else "server_error",
        "param": param if param is None else param[:MAX_VALUE_LENGTH],
        "code": code or CODES.get(status, "invalid_value" if param else "invalid_request"),
    }
    if value is not None:
        error["value"] = _short(value)
    if limit is not None:
        error["limit"] = _short(limit)
    return {"error": error}


def describe(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers for an error; what is not ours is told to the operator's log only."""
    match error:
        case QueueFull():
            headers = {"retry-after": str(max(1, math.ceil(error.retry_after)))}
            return 503, _of_request(error), headers
        case RequestError():
            return error.status, _of_request(error), {}
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
    body = envelope("internal error; the server's log has the details", 500)
    return 500, body, {"connection": "close"}  # uvicorn cuts it after a bug; a client that is told does not reuse it


def error_response(error: Exception) -> Response:
    """The response that tells a client of an error."""
    status, body, headers = describe(error)
    return json_response(body, status, headers)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response; faster than going through a model."""
    return Response(to_json(body), status, headers, media_type="application/json")


def install_handlers(app: FastAPI) -> None:
    """Every error that leaves a route becomes an envelope. Mutates the app."""

    async def on_error(request: Request, error: Exception) -> Response:
        response = error_response(_explained(error, request))
        client = request.app.state.server.loaded
        if response.status_code == 400 and client is not None and not is_for_operators(request.scope["path"]):
            client.count_rejection("invalid")
        return response

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await on_error(request, _of_validation(error))

    async def on_gone(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(ClientGone, on_gone)
    for kind in (JaxserveError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)


def _explained(error: Exception, request: Request) -> Exception:
    """Return an error of the router's with the path, and what can be asked instead; others as they are."""
    path = request.scope["path"][:MAX_VALUE_LENGTH]
    match error:
        case HTTPException(status_code=404, detail="Not Found"):
            return HTTPException(404, f"there is nothing at {path!r}: {_hint(path)}")
        case HTTPException(status_code=405):
            methods = {method.strip() for method in (error.headers or {}).get("Allow", "").split(",")}
            allowed = ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
            message = f"{request.method} is not possible at {path!r}, only {allowed}"
            return HTTPException(405, message, {"allow": allowed})
    return error


def _hint(path: str) -> str:
    for prefix, name in OTHER_APIS.items():
        if f"{path}/".startswith(f"{prefix}/"):
            return f"{name} is not served; endpoints are {', '.join(ENDPOINTS)}"
    meant = [endpoint for endpoint in ENDPOINTS if path.endswith(endpoint.removeprefix("/v1"))]
    question = f"did you mean {meant[0]}? " if meant else ""
    return f"{question}endpoints are {', '.join(ENDPOINTS)}; /docs describes all"


def _of_request(error: RequestError) -> dict[str, Any]:
    return envelope(str(error), error.status, param=error.field, code=error.code, value=error.value, limit=error.limit)


def _of_validation(error: RequestValidationError) -> RequestError:
    """The first complaint about a body's types, with the path of the field."""
    first = error.errors()[0]
    place, *path = first["loc"]
    field = ".".join(str(part) for part in (path if place in ("body", "query") else first["loc"])) or None
    message = f"{field}: {first['msg']}" if field else f"the body: {first['msg']}"
    error = RequestError(message, field=field, value=_short(first.get("input")))
    error.code = VALIDATION_CODES.get(first["type"])
    return error


def _short(value: Any) -> Any:
    """A value that is safe to repeat: JSON, and not long."""
    if value is None or (isinstance(value, int) and abs(value) < 2**53):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    text = value if isinstance(value, str) else _REPR.repr(value)
    return text if len(text) <= MAX_VALUE_LENGTH else text[:MAX_VALUE_LENGTH] + "..."
