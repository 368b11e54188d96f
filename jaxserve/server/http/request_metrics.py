"""Counts and durations of HTTP requests, by endpoint, method and kind of status.

Nothing that a client sends becomes a label: paths that are not served, and methods that a path does not take, are one.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.server.http.normalize import STATUS
from jaxserve.telemetry import HttpFigures
from jaxserve.telemetry.definitions import HTTP_BOUNDS
from jaxserve.telemetry.histogram import Histogram

OTHERS = "none"  # the endpoint of requests to paths that are not served
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
FIRST_STATUSES = ("2xx", "4xx", "5xx")  # counted from 0 on


class RequestMetrics:
    """The requests that have been answered. Its methods are called on the event loop alone."""

    def __init__(self, routes: Iterable[BaseRoute]):
        """Count requests to these routes, and all others together."""
        endpoints = [route for route in routes if isinstance(route, Route)]
        self._taken = {
            (route.path_format, method) for route in endpoints for method in (route.methods or ()) if method in METHODS
        }
        self._exact = {route.path_format for route in endpoints if "{" not in route.path_format}
        self._templates = [(route.path_regex, route.path_format) for route in endpoints if "{" in route.path_format]
        self._requests = Counter(
            {(method, path, status): 0 for path, method in sorted(self._taken) for status in FIRST_STATUSES}
        )
        self._seconds: dict[tuple[str, ...], Histogram] = {}

    def count(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count a request whose response has ended, after `seconds`."""
        endpoint = self._endpoint(path)
        if (endpoint, method) not in self._taken:
            endpoint, method = OTHERS, method if method in METHODS else OTHERS
        self._requests[method, endpoint, f"{status // 100}xx"] += 1
        if (histogram := self._seconds.get((method, endpoint))) is None:
            histogram = self._seconds[method, endpoint] = Histogram(HTTP_BOUNDS)
        histogram.observe(seconds)

    def figures(self) -> HttpFigures:
        """Return the values as they are now."""
        return HttpFigures(dict(self._requests), {labels: one.state() for labels, one in self._seconds.items()})

    def _endpoint(self, path: str) -> str:
        """Return the path of an endpoint, with the names of its parts that differ in braces."""
        if path in self._exact:
            return path
        return next((endpoint for regex, endpoint in self._templates if regex.match(path)), OTHERS)


class CountRequests:
    """Middleware that counts requests, with those that guards refuse.

    It needs the paths that `TidyPath` has tidied, and the statuses that `RequestId` has noted.
    """

    def __init__(self, app: ASGIApp, metrics: RequestMetrics, clock: Callable[[], float] = time.monotonic):
        self.app = app
        self._metrics, self._clock = metrics, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = self._clock()
        try:
            await self.app(scope, receive, send)
        finally:
            status = scope["state"].get(STATUS, 500)  # not there if the app has failed before it answered
            self._metrics.count(scope["method"], scope["path"], status, self._clock() - begun)
