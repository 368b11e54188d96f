"""Probes, /metrics, /load and /version: for balancers, scrapers and operators."""

import asyncio

from fastapi import APIRouter, Response

from jaxserve._version import __version__
from jaxserve.server.errors import json_response
from jaxserve.server.load import load_of
from jaxserve.server.state import Condition, State
from jaxserve.telemetry.exposition import CONTENT_TYPE

router = APIRouter(tags=["operations"])


@router.get("/health")
@router.get("/ready")
@router.get("/ping")
@router.post("/ping")
async def health(state: State) -> Response:
    """Answer 200 if requests should be sent here, and 503 while the server loads or ends, or if the engine has failed.

    /ready is another name, and /ping the one of SageMaker.
    """
    now = state.condition()
    return _probe(now, ok=now.ready)


@router.get("/live")
async def live(state: State) -> Response:
    """Answer 200 while the process makes progress, also while it loads or ends, and 503 if the engine has failed."""
    now = state.condition()
    return _probe(now, ok=now.live)


@router.get("/metrics")
async def metrics(state: State) -> Response:
    """Return Prometheus metrics, which are empty while the model is loading."""
    client = state.loaded
    text = b"" if client is None else await asyncio.to_thread(client.metrics_text)  # 2 to 4 ms for each instance
    return Response(text, media_type=CONTENT_TYPE)


@router.get("/load")
async def load(state: State) -> Response:
    """Return the load: requests in flight, sequences and tokens that wait, and KV capacity now and at most."""
    return json_response(load_of(state.loaded_client(), state.in_flight))


@router.get("/version")
async def get_version() -> dict[str, str]:
    """Return the version of jaxserve."""
    return {"version": __version__}


def _probe(now: Condition, *, ok: bool) -> Response:
    body = {"status": now.status} | ({"reason": now.reason} if now.reason else {})
    return json_response(body) if ok else json_response(body, 503, {"retry-after": "1"})
