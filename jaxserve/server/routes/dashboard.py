"""/dashboard: a page that shows the plan and the load, live. The page is open, its data need the admin key."""

from importlib.resources import files

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse

from jaxserve.server import dashboard as assets
from jaxserve.server.auth import DASHBOARD, DASHBOARD_EVENTS
from jaxserve.server.dashboard_stream import Feed
from jaxserve.server.state import State
from jaxserve.server.streaming import EventStream

router = APIRouter(include_in_schema=False)

MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
ASSETS = {file.name: file.read_bytes() for file in files(assets).iterdir() if file.name.endswith(tuple(MEDIA_TYPES))}
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@router.get(DASHBOARD)
async def page(request: Request) -> Response:
    """The page, at the address to which its links are relative."""
    if request.scope.get("raw_path", b"").endswith(b"/"):
        return RedirectResponse(".." + DASHBOARD)
    return _asset("index.html")


@router.get(DASHBOARD_EVENTS)
async def events(request: Request, state: State) -> Response:
    """The engine's state as server-sent events: the history of 15 minutes first, then one a second."""
    return await EventStream.start(request, Feed(state).events(), {})


@router.get(DASHBOARD + "/{name}")
async def asset(name: str) -> Response:
    """What the page is made of."""
    if name not in ASSETS:
        raise HTTPException(404)
    return _asset(name)


def _asset(name: str) -> Response:
    media_type = MEDIA_TYPES[name[name.rindex(".") :]]
    return Response(ASSETS[name], media_type=media_type, headers=HEADERS)
