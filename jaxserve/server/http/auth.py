"""Authentication: reading the key of a request, and which paths need an API key, the admin key or no key."""

import hmac
from collections.abc import Iterable, Sequence

from starlette.types import Scope

PROBES = frozenset({"/health", "/ready", "/ping", "/live", "/metrics"})
ADMIN = "/admin"
RESET_PREFIX_CACHE = "/reset_prefix_cache"
HOME = "/"
DOCS = "/docs"
PAGES = "/pages"
DASHBOARD = "/dashboard"
DASHBOARD_EVENTS = "/dashboard/events"
PUBLIC = frozenset({HOME, DOCS, DASHBOARD, "/favicon.ico"})
# As OpenAI, Azure and Anthropic send keys.
KEY_HEADERS = (b"authorization", b"api-key", b"x-api-key")


def is_for_operators(path: str) -> bool:
    """Return whether a path shows or changes the engine's state, and so needs the admin key."""
    return path in (ADMIN, DASHBOARD_EVENTS, RESET_PREFIX_CACHE) or path.startswith(f"{ADMIN}/")


def is_public(path: str) -> bool:
    """Return whether a path needs no key: probes, the pages for browsers and their files, but not their data."""
    files = path.startswith((f"{PAGES}/", f"{DASHBOARD}/")) and path != DASHBOARD_EVENTS
    return files or path in PROBES or path in PUBLIC


def has_key(scope: Scope, keys: Iterable[bytes]) -> bool:
    """Return whether one of the key headers holds one of `keys`, compared in constant time."""
    tokens = _tokens(scope)
    matches = [hmac.compare_digest(token, key) for token in tokens for key in keys]
    return any(matches)


def key_number(scope: Scope, keys: Sequence[bytes]) -> int | None:
    """Return the position of the first of `keys` that a request sends, by which clients are told apart, or None."""
    return next((number for number, key in enumerate(keys) if has_key(scope, (key,))), None)


def sender_of(scope: Scope, keys: Sequence[str]) -> str:
    """Return a name of the client that sends a request, by its key, else by its address.

    Those who connect by a Unix socket are one.
    """
    number = key_number(scope, [key.encode() for key in keys])
    address = scope.get("client")
    return f"key {number}" if number is not None else f"address {address[0]}" if address else "the Unix socket"


def _tokens(scope: Scope) -> list[bytes]:
    """Return the keys that a request sends, or none if a header is repeated.

    A proxy may have checked another of the repeated values.
    """
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
