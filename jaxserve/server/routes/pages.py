"""/: the chat page, /docs: the reference of the API, and their files. They are public, their data need the API key."""

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse

from jaxserve.server import dashboard, pages
from jaxserve.server.http.auth import DOCS, HOME, PAGES
from jaxserve.server.routes.assets import Assets

router = APIRouter(include_in_schema=False)

FILES = Assets(pages)
ICON = Assets(dashboard).response("icon.svg")


@router.api_route(HOME, methods=["GET", "POST"])
async def chat(request: Request) -> Response:
    """Return the chat page. A client that posts or wants JSON alone gets the 404 that lists the endpoints.

    Without its trailing slash, the prefix of a proxy redirects to the address to which the page's links are relative.
    """
    accepted = request.headers.get("accept", "")
    if request.method != "GET" or ("json" in accepted and "html" not in accepted):
        raise HTTPException(404)
    prefix = request.scope.get("root_path", "")
    if not request.scope.get("raw_path", b"/").endswith(b"/") and prefix:
        return RedirectResponse(f"{prefix.rpartition('/')[2]}/")
    return FILES.response("chat.html")


@router.get(DOCS)
async def reference(request: Request) -> Response:
    """Return the reference of the API. With a trailing slash, redirect to the address without it, as the dashboard."""
    if request.scope.get("raw_path", b"").endswith(b"/"):
        return RedirectResponse(".." + DOCS)
    return FILES.response("reference.html")


@router.get("/favicon.ico")
async def icon() -> Response:
    """Return the icon, for which browsers ask at this address whatever a page says."""
    return ICON


@router.get(PAGES + "/{name}")
async def asset(name: str) -> Response:
    """Return a file of a page."""
    return FILES.response(name)
