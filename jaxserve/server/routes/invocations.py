"""POST /invocations: SageMaker's one endpoint for requests, which go to the endpoint that their fields belong to."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.core.errors import RequestError
from jaxserve.server.http.body import parse_body
from jaxserve.server.http.middleware import replay
from jaxserve.server.http.offload import off_loop_if_large
from jaxserve.server.routes.json_route import max_token_items
from jaxserve.server.state import State

router = APIRouter(tags=["operations"])

INVOCATIONS = "/invocations"
# The endpoint of a body by fields of which it must have all. The first that fits is taken, as in vLLM.
ENDPOINTS: Mapping[tuple[str, ...], str] = {
    ("messages",): "/v1/chat/completions",
    ("prompt",): "/v1/completions",
    ("query", "documents"): "/v1/rerank",
    ("input",): "/v1/embeddings",
    ("text_1",): "/v1/score",
    ("queries",): "/v1/score",
    ("data_1",): "/v1/score",
}
# What the router has found out about the request, and finds out anew when it routes it once more.
ROUTED = ("endpoint", "route", "router", "path_params")


class Forwarded(Response):
    """The response of another endpoint to the same request, for which the app routes it once more."""

    def __init__(self, request: Request, path: str, body: bytes):
        super().__init__()
        kept = {key: value for key, value in request.scope.items() if key not in ROUTED}
        self._scope: Scope = {**kept, "path": path, "raw_path": path.encode()}
        self._router, self._body = request.app.router, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the other endpoint does."""
        await self._router(self._scope, replay(self._body, receive), send)


@router.post(INVOCATIONS, response_model=None)
async def invocations(request: Request, state: State) -> Response:
    """Answer a body of chat completions, completions, embeddings, scores or rankings as its own endpoint does."""
    body = await request.body()
    value = await off_loop_if_large(len(body), parse_body, body, max_token_items(state.client().info))
    return Forwarded(request, _endpoint(value), body)


def _endpoint(body: Any) -> str:
    """Return the endpoint that a body belongs to. Raise RequestError if it has the fields of none."""
    if isinstance(body, dict):
        for fields, path in ENDPOINTS.items():
            if all(field in body for field in fields):
                return path
    known = ", ".join(" and ".join(fields) for fields in ENDPOINTS)
    raise RequestError(f"the body must be an object with the fields of an endpoint: {known}")
