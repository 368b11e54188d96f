"""A FastAPI route whose bodies are strict JSON, read at a cost that is bounded and, where it is large, off the loop."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from jaxserve.server.body import parse_body
from jaxserve.server.offload import off_loop

SMALL_BODY = 16 * 1024  # bytes; one that is not larger costs less than the way to another thread
MAX_COMPLAINTS = 20  # of a body's fields; the answer tells of one


class ParsedRequest(Request):
    """A request whose body has been read: FastAPI gets the model instead of JSON."""

    parsed: Any = None

    async def json(self) -> Any:
        return self.parsed


class JsonRoute(APIRoute):
    """Refuses bodies of other media types, so that a web page of elsewhere cannot post a form here.

    Parses and validates bodies itself, since FastAPI does so on the event loop.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if request.method in ("POST", "PUT") and media_type != "application/json":
                raise HTTPException(415, "the body must be of type application/json (header content-type)")
            info = request.app.state.server.client().info
            most = max(info.max_model_len, info.max_queued_tokens)
            request = ParsedRequest(request.scope, request.receive)
            if (body := await request.body()) and self.body_field is not None:
                model, large = self.body_field.field_info.annotation, len(body) > SMALL_BODY
                request.parsed = await off_loop(_read, model, body, most) if large else _read(model, body, most)
            return await handler(request)

        return strict


def _read(model: type[BaseModel], body: bytes, max_prompt_items: int) -> BaseModel:
    """Return the model of a body. Raises HTTPException, RequestError or RequestValidationError."""
    value = parse_body(body, max_prompt_items)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        complaints = error.errors(include_url=False)[:MAX_COMPLAINTS]
        raise RequestValidationError([{**first, "loc": ("body", *first["loc"])} for first in complaints]) from None
