"""GET /health, /ready, /metrics, /load and /version: for probes, scrapers, balancers and operators."""

import asyncio

from fastapi import APIRouter, Response

from jaxserve._version import __version__
from jaxserve.core.errors import EngineFailed
from jaxserve.server.errors import json_response
from jaxserve.server.load import load_of
from jaxserve.server.state import State
from jaxserve.telemetry.exposition import CONTENT_TYPE

router = APIRouter(tags=["operations"])


@router.get("/health")
async def health(state: State) -> Response:
    """Answer 200 while the engine makes progress or is still loading, and 503 when it has failed or is stuck."""
    client = state.loaded
    if client is None:
        return json_response({"status": "loading"})
    try:
        client.check_health()
    except EngineFailed as error:
        return json_response({"status": "failed", "reason": str(error)}, 503)
    now = client.snapshot()
    return json_response({"status": "ok", "steps": now.steps, "running": now.num_running, "waiting": now.num_waiting})


@router.get("/ready")
async def ready(state: State) -> Response:
    """Answer 200 if requests are accepted, and 503 while loading, draining or stopped."""
    if state.ready:
        return json_response({"status": state.phase.value})
    status = "stopped" if state.phase.value == "serving" else state.phase.value
    return json_response({"status": status}, 503, {"retry-after": "1"})


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
