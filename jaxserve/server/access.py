"""Who may come in where: the keys a request carries, and the paths that need one key, the other, or none."""

import hmac
from collections.abc import Iterable

from starlette.types import Scope

PROBES = frozenset({"/health", "/ready", "/metrics"})  # for probes and scrapers
ADMIN = "/admin"
DASHBOARD = "/dashboard"
DASHBOARD_EVENTS = "/dashboard/events"


def is_for_operators(path: str) -> bool:
    """Whether a path shows or changes the engine's plan."""
    return path in (ADMIN, DASHBOARD_EVENTS) or path.startswith(f"{ADMIN}/")


def is_open(path: str) -> bool:
    """Whether a path tells nothing that is worth a key: probes, and the dashboard's page without its data."""
    return path in PROBES or path == DASHBOARD or (path.startswith(f"{DASHBOARD}/") and path != DASHBOARD_EVENTS)


def carries(scope: Scope, keys: Iterable[bytes]) -> bool:
    """Whether a request has `Authorization: Bearer <key>` with one of the keys; compared in constant time."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) != 1:
        return False
    scheme, _, token = given[0].partition(b" ")
    if scheme.lower() != b"bearer":
        return False
    matches = [hmac.compare_digest(token.strip(), key) for key in keys]
    return any(matches)
