"""The ASGI application: routes, guards and error handlers of the HTTP API over one engine."""

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from jaxserve.engine.client import EngineClient
from jaxserve.server.errors import install_handlers
from jaxserve.server.http.middleware import AdminGuard, ApiKeyGuard, BodyLimit
from jaxserve.server.http.normalize import HeadAsGet, RequestId, TidyPath
from jaxserve.server.http.request_metrics import CountRequests, RequestMetrics
from jaxserve.server.load import InFlight
from jaxserve.server.routes import (
    admin,
    chat,
    completions,
    dashboard,
    embeddings,
    invocations,
    messages,
    models,
    operations,
    pages,
    responses,
    scoring,
    tokenization,
)
from jaxserve.server.routes.json_route import JsonRoute
from jaxserve.server.schemas.left_out import HEADER
from jaxserve.server.settings import ServerSettings
from jaxserve.server.state import ServerState

# What pages of other origins may read of a response, besides the headers that browsers always show.
EXPOSED_HEADERS = ("x-request-id", "request-id", "retry-after", "www-authenticate", "accept-encoding", HEADER)
GENERATION = (chat.router, responses.router, responses.json_router, completions.router, messages.router)
OTHERS = (embeddings, scoring, models, tokenization, invocations, operations, admin, dashboard, pages)
ROUTERS = (*GENERATION, *(module.router for module in OTHERS), admin.json_router)
JSON_ROUTES = tuple(
    route for router in ROUTERS for route in router.routes if isinstance(route, JsonRoute) and "POST" in route.methods
)


def create_app(client: EngineClient | None, settings: ServerSettings) -> FastAPI:
    """Return the app of an engine, whose `ServerState` is `app.state.server`.

    Without a client the app answers probes, and everything else with 503, until `app.state.server.attach(client)`.
    """
    app = FastAPI(
        title="jaxserve",
        summary="The APIs of OpenAI and Anthropic",
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.state.server = ServerState(client, settings)
    app.state.endpoints = tuple(route.path for route in JSON_ROUTES if route.include_in_schema)
    install_handlers(app)
    for router in ROUTERS:
        app.include_router(router)
    # The middleware added last is the outermost.
    app.add_middleware(InFlight)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, timeout=settings.body_timeout)
    app.add_middleware(AdminGuard, settings=settings)
    if settings.api_keys:
        app.add_middleware(ApiKeyGuard, keys=settings.api_keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
            # A page from an allowed origin may reach a server on its user's machine.
            allow_private_network=True,
        )
    app.state.request_metrics = RequestMetrics([*app.routes, *(route for router in ROUTERS for route in router.routes)])
    app.add_middleware(CountRequests, metrics=app.state.request_metrics)
    app.add_middleware(TidyPath, root_path=settings.root_path)
    app.add_middleware(HeadAsGet)
    app.add_middleware(RequestId)
    return app
