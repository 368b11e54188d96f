"""A FastAPI route that parses strict JSON bodies at a bounded cost, and large ones off the event loop."""

import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import lru_cache
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from jaxserve.engine.client import ModelInfo
from jaxserve.server.http.body import parse_body
from jaxserve.server.http.offload import off_loop
from jaxserve.server.schemas.body import IGNORE_UNKNOWN
from jaxserve.server.schemas.left_out import HEADER, LEFT_OUT, LeftOut

logger = logging.getLogger(__name__)

# Parsing up to this many bytes costs less than handing them to another thread.
MAX_INLINE_BODY = 16 * 1024
MAX_VALIDATION_ERRORS = 20  # per body; the response names the first


class ParsedRequest(Request):
    """A request that gives FastAPI an already validated model instead of JSON."""

    parsed: Any = None

    async def json(self) -> Any:
        """Return the validated model."""
        return self.parsed


class JsonRoute(APIRoute):
    """A route that refuses other media types than JSON, so that a foreign web page cannot post a form here.

    It parses and validates bodies itself, since FastAPI does so on the event loop.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that parses the body before FastAPI's own handler runs."""
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if request.method in ("POST", "PUT", "PATCH") and media_type != "application/json":
                given = repr(media_type[:80]) if media_type else "missing"
                raise HTTPException(415, f"the header content-type is {given}: it must be application/json")
            server = request.app.state.server
            info, settings = server.client().info, server.settings
            left_out = LeftOut() if settings.replace_unsupported else None
            context = {IGNORE_UNKNOWN: settings.ignore_unknown_fields, LEFT_OUT: left_out}
            limit = max_token_items(info)
            request = ParsedRequest(request.scope, request.receive)
            if (body := await request.body()) and self.body_field is not None:
                model, large = self.body_field.field_info.annotation, len(body) > MAX_INLINE_BODY
                if large:
                    request.parsed = await off_loop(_read, model, body, limit, context)
                else:
                    request.parsed = _read(model, body, limit, context)
            response = await handler(request)
            if left_out:
                _report(left_out.kinds)
                response.headers[HEADER] = str(left_out)
            return response

        return strict


def max_token_items(info: ModelInfo) -> int:
    """Return how many items that stand for tokens a body may have."""
    return info.vocab_size + max(info.max_model_len, info.max_queued_tokens)


@lru_cache(maxsize=256)
def _report(kinds: tuple[str, ...]) -> None:
    """Log what is left out of requests, once for the same kinds."""
    logger.info("the model cannot read what requests have: left out are %s (--replace-unsupported)", ", ".join(kinds))


def _read(model: type[BaseModel], body: bytes, max_token_items: int, context: Mapping[str, Any]) -> BaseModel:
    """Return the validated model of a body. Raise HTTPException, RequestError or RequestValidationError."""
    value = parse_body(body, max_token_items)
    try:
        return model.model_validate(value, context=context)
    except ValidationError as error:
        complaints = error.errors(include_url=False)[:MAX_VALIDATION_ERRORS]
        raise RequestValidationError([{**first, "loc": ("body", *first["loc"])} for first in complaints]) from None
