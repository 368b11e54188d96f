"""/dashboard: a live page about the plan and the load. The page itself is public, its data need the admin key."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from jaxserve.server import dashboard as assets
from jaxserve.server.http.auth import DASHBOARD, DASHBOARD_EVENTS
from jaxserve.server.http.streaming import EventStream
from jaxserve.server.routes.assets import Assets
from jaxserve.server.state import Phase, ServerState, State

router = APIRouter(include_in_schema=False)

EVENT_INTERVAL = 1.0  # seconds between two events
MAX_DECISIONS = 100
FILES = Assets(assets)


class DashboardStream:
    """The events for one viewer of the dashboard: the whole history first, then only what is new."""

    def __init__(self, state: ServerState):
        self._state = state
        self._control = state.control()
        client = state.loaded
        assert client is not None  # it has a control plane
        self._client = client
        self._model = (state.settings.served_model_names or (client.info.name,))[0]
        self._sent_until = float("-inf")  # time of the newest sample sent
        self._decisions: list[dict[str, Any]] | None = None

    def event(self) -> dict[str, Any]:
        """Return the state now, the samples since the last event, and the decisions if they have changed."""
        samples = self._control.history(self._sent_until)
        if samples:
            self._sent_until = samples[-1]["time"]
        event = {
            "model": self._model,
            "phase": self._state.phase.value,
            "status": self._control.status(),
            "requests": self._client.outcomes(),
            "samples": samples,
        }
        decisions = self._control.decisions(MAX_DECISIONS)
        if decisions != self._decisions:
            event["decisions"] = self._decisions = decisions
        return event

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield one event a second until the server has drained."""
        while True:
            yield self.event()
            if self._state.phase is Phase.DRAINING and not self._has_requests():
                return
            await asyncio.sleep(EVENT_INTERVAL)

    def _has_requests(self) -> bool:
        now = self._client.snapshot()
        return now.num_running + now.num_waiting > 0


@router.get(DASHBOARD)
async def page(request: Request) -> Response:
    """Return the page. With a trailing slash, redirect to the address to which its links are relative."""
    if request.scope.get("raw_path", b"").endswith(b"/"):
        return RedirectResponse(".." + DASHBOARD)
    return FILES.response("index.html")


@router.get(DASHBOARD_EVENTS)
async def events(request: Request, state: State) -> Response:
    """Stream the engine's state: first the history of 15 minutes, then one event a second."""
    return await EventStream.start(request, DashboardStream(state).events(), {})


@router.get(DASHBOARD + "/{name}")
async def asset(name: str) -> Response:
    """Return a file of the page."""
    return FILES.response(name)
