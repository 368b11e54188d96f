"""Errors in the envelope of Anthropic's API: {"type": "error", "error": {"type", "message"}, "request_id"}."""

import contextlib
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from jaxserve.core.errors import PromptTooLong, UnsupportedParameter

MESSAGES = "/v1/messages"
MODELS = "/v1/models"  # a path of both APIs
VERSION = "anthropic-version"  # a header that all requests of Anthropic's clients have
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
OVERLOADED = 529  # Anthropic's status for a full queue


class ThreadUnsupported(UnsupportedParameter):
    """Raised when a client wants the server to keep the conversation. Its tool runner then sends the whole one."""

    code = "thread_unsupported_request"


def is_anthropic(scope: Scope) -> bool:
    """Return whether a request is one of Anthropic's API."""
    if _is_below(scope["path"], MESSAGES):
        return True
    return _is_below(scope["path"], MODELS) and VERSION in Headers(scope=scope)


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")


def new_request_id() -> str:
    """Return a unique id for the header `request-id`."""
    return f"req_{uuid.uuid4().hex}"


def messages_error(status: int, body: Mapping[str, Any], request_id: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error, given those in OpenAI's form."""
    error = body["error"]
    if error["code"] == "queue_full":
        status = OVERLOADED
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    shown: dict[str, Any] = {"type": kind, "message": error["message"]}
    if error["code"] == ThreadUnsupported.code:
        shown["details"] = {"error_code": error["code"]}
    return status, {"type": "error", "error": shown, "request_id": request_id}


@contextlib.contextmanager
def announcing_long_prompts() -> Iterator[None]:
    """Begin the messages of PromptTooLong errors with the words by which Anthropic's clients recognise them."""
    try:
        yield
    except PromptTooLong as error:
        error.args = (f"prompt is too long: {error}",)
        raise
