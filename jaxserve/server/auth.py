"""Who may come in where: the keys a request carries, and the paths that need one key, the other, or none."""

import hmac
from collections.abc import Iterable

from starlette.types import Scope

PROBES = frozenset({"/health", "/ready", "/metrics"})  # for probes and scrapers
ADMIN = "/admin"
DASHBOARD = "/dashboard"
DASHBOARD_EVENTS = "/dashboard/events"
KEY_HEADERS = (b"authorization", b"api-key", b"x-api-key")  # OpenAI's, Azure's and Anthropic's


def is_for_operators(path: str) -> bool:
    """Whether a path shows or changes the engine's plan."""
    return path in (ADMIN, DASHBOARD_EVENTS) or path.startswith(f"{ADMIN}/")


def is_open(path: str) -> bool:
    """Whether a path tells nothing that is worth a key: probes, and the dashboard's page without its data."""
    return path in PROBES or path == DASHBOARD or (path.startswith(f"{DASHBOARD}/") and path != DASHBOARD_EVENTS)


def carries(scope: Scope, keys: Iterable[bytes]) -> bool:
    """Whether a request has one of the keys in one of the headers for it; compared in constant time."""
    tokens = _tokens(scope)
    matches = [hmac.compare_digest(token, key) for token in tokens for key in keys]
    return any(matches)


def _tokens(scope: Scope) -> list[bytes]:
    """What a request gives as its keys: nothing if a header is there twice, since a proxy may have seen the other."""
    tokens = []
    for header in KEY_HEADERS:
        given = [value for name, value in scope["headers"] if name == header]
        if len(given) > 1:
            return []
        for value in given:
            scheme, _, token = value.partition(b" ") if header == b"authorization" else (b"bearer", b"", value)
            if scheme.lower() == b"bearer":
                tokens.append(token.strip())
    return tokens
