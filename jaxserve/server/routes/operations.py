"""Probes, /metrics, /load and /version: for balancers, scrapers and operators."""

import asyncio
import gzip

from fastapi import APIRouter, Request, Response

from jaxserve._version import __version__
from jaxserve.server.errors import json_response
from jaxserve.server.http.auth import RESET_PREFIX_CACHE
from jaxserve.server.load import load_of
from jaxserve.server.state import Condition, State
from jaxserve.telemetry import exposition
from jaxserve.telemetry.exposition import CONTENT_TYPE, OPENMETRICS, OPENMETRICS_TYPE

GZIP_LEVEL = 5  # takes a third of the time of level 9, for a page that is hardly larger

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
async def metrics(request: Request, state: State) -> Response:
    """Return metrics for Prometheus, or in OpenMetrics if Accept names it. Those of the engine are there once it is."""
    openmetrics = _accepts(request.headers.get("accept", ""), OPENMETRICS)
    compressed = _accepts(request.headers.get("accept-encoding", ""), "gzip")
    headers = {"vary": "accept, accept-encoding"} | ({"content-encoding": "gzip"} if compressed else {})
    client, http = state.loaded, request.app.state.request_metrics.figures()

    def page() -> bytes:
        if client is None:
            text = exposition.render(None, http, openmetrics=openmetrics)
        else:
            text = client.metrics_text(http, openmetrics=openmetrics)
        return gzip.compress(text, GZIP_LEVEL) if compressed else text

    # In a thread: it takes 2 to 4 ms for each instance.
    return Response(
        await asyncio.to_thread(page), media_type=OPENMETRICS_TYPE if openmetrics else CONTENT_TYPE, headers=headers
    )


@router.post(RESET_PREFIX_CACHE)
async def reset_prefix_cache(state: State) -> Response:
    """Forget all prompts in the prefix cache, for operators. Running requests go on with the pages that they have."""
    state.client().reset_prefix_cache()
    return json_response({"status": "ok"})


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


def _accepts(header: str, kind: str) -> bool:
    """Return whether a header such as Accept lists a kind, and does not rule it out."""
    for entry in header.split(","):
        name, _, parameters = entry.partition(";")
        if name.strip().lower() == kind:
            return not parameters.replace(" ", "").startswith("q=0") or "q=0." in parameters
    return False
