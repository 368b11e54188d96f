"""An HTTP client of the routes for operators of a running server."""

import json
import math
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import httpx2

from jaxserve.core.errors import ConfigError, JaxserveError
from jaxserve.core.server_address import ServerAddress, tls_hint, trusted_authorities
from jaxserve.server.settings import is_loopback

TIMEOUT = httpx2.Timeout(10.0)  # s; events come every second
YAML = "application/yaml"


class ServerRefused(JaxserveError):
    """Raised when the server answers an error, with the server's message."""


class PlanClient:
    """A client of one server's plan, used as a context manager.

    Every method raises `ServerRefused` if the server answers an error, and `JaxserveError` if it cannot be reached.
    """

    def __init__(self, url: str, admin_key: str | None):
        self._url = url.rstrip("/")
        address = ServerAddress.parse(url)
        headers = {b"authorization": b"Bearer " + admin_key.encode()} if admin_key else {}
        try:
            target = httpx2.URL(address.base_url)
        except httpx2.InvalidURL as error:
            raise ConfigError(f"invalid address {url!r}: {error} (--url)") from error
        if target.scheme not in ("http", "https"):
            raise ConfigError(f"invalid address {url!r}: give one such as http://127.0.0.1:8000 (--url)")
        transport = httpx2.HTTPTransport(uds=address.socket) if address.socket else None
        self._http = httpx2.Client(
            base_url=target,
            headers=headers,
            timeout=TIMEOUT,
            transport=transport,
            verify=trusted_authorities(),
            trust_env=not is_loopback(target.host),  # a proxy is not on the way to this machine
        )

    def __enter__(self) -> "PlanClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def plan(self, form: str) -> str:
        """Return the plan in force as "yaml" or "json"."""
        text = self._request("GET", "/admin/plan", params={"format": form}).text
        return json.dumps(json.loads(text), indent=2) if form == "json" else text

    def plan_dict(self) -> dict[str, Any]:
        """Return the plan in force as plain data."""
        return _mapping(self._request("GET", "/admin/plan", params={"format": "json"}))

    def status(self) -> dict[str, Any]:
        """Return the engine's current state."""
        return _mapping(self._request("GET", "/admin/status"))

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        """Return the latest decisions, newest last."""
        found: list[dict[str, Any]] = _mapping(self._request("GET", "/admin/decisions", params={"limit": limit}))[
            "decisions"
        ]
        return found

    def set_plan(self, text: str) -> dict[str, Any]:
        """Make the server change to a plan in YAML or JSON, and return its status."""
        content = text.encode()
        return _mapping(self._request("PUT", "/admin/plan", content=content, headers={"content-type": YAML}))

    def edit_plan(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make the server change its instances. Return the plan that it changes to as `wanted`, and its `status`."""
        return _mapping(self._request("PATCH", "/admin/plan", json=body))

    def set_policy(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Set the policy that decides from now on, and return the server's status.

        `body` has the name as `policy`, and may have `settings`. Infinity is sent as null, as JSON has no infinity.
        """
        settings = body.get("settings")
        if isinstance(settings, Mapping):
            settings = {name: None if value == math.inf else value for name, value in settings.items()}
        return _mapping(self._request("PUT", "/admin/policy", json={"policy": body["policy"], "settings": settings}))

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the dashboard's events until the server ends them."""
        try:
            with self._http.stream("GET", "/dashboard/events") as response:
                if response.is_error:
                    response.read()
                    raise _refusal(response)
                for line in response.iter_lines():
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        return
                    if data:
                        yield _event(data)
        except httpx2.TransportError as error:
            raise self._unreachable(error) from error

    def _request(self, method: str, path: str, **options: Any) -> httpx2.Response:
        try:
            response = self._http.request(method, path, **options)
        except httpx2.TransportError as error:
            raise self._unreachable(error) from error
        if response.is_error:
            raise _refusal(response)
        return response

    def _unreachable(self, error: httpx2.TransportError) -> JaxserveError:
        reason = f"{error or type(error).__name__}{tls_hint(error)}"
        return JaxserveError(f"cannot reach {self._url}: {reason} (--url or JAXSERVE_URL)")


def _event(data: str) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        raise ServerRefused(event["error"]["message"])
    return event


def _mapping(response: httpx2.Response) -> dict[str, Any]:
    found: dict[str, Any] = response.json()
    return found


def _refusal(response: httpx2.Response) -> ServerRefused:
    """Return the server's message, or its status if it does not seem to be a jaxserve server."""
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{response.url} answered {response.status_code}; is it a jaxserve server?"
    hint = " (--admin-key or JAXSERVE_ADMIN_KEY)" if response.status_code == 401 else ""
    return ServerRefused(message + hint)
