"""A FastAPI route whose bodies are strict JSON: no NaN, no lone surrogates, no nesting without end."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json


class StrictRequest(Request):
    """Parses with pydantic's own parser, which bounds nesting and refuses what JSON does not have."""

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(400, f"the body is not valid JSON: {error}") from error


class JsonRoute(APIRoute):
    """Refuses bodies of other media types, so that a web page of elsewhere cannot post a form here."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if request.method in ("POST", "PUT") and media_type != "application/json":
                raise HTTPException(415, "the body must be of type application/json (header content-type)")
            return await handler(StrictRequest(request.scope, request.receive))

        return strict
