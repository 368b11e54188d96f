"""The load of an engine, as balancers and autoscalers read it from GET /load."""

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.engine.client import EngineClient
from jaxserve.telemetry import KVCapacity, Snapshot

API = ("/v1/", "/invocations")  # beginnings of paths


class InFlight:
    """Middleware that counts requests that the engine works for: those posted to the API, until their answers end."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith(API):
            await self.app(scope, receive, send)
            return
        state = scope["app"].state.server
        state.in_flight += 1
        try:
            await self.app(scope, receive, send)
        finally:
            state.in_flight -= 1


def load_of(client: EngineClient, in_flight: int) -> dict[str, Any]:
    """Return the load as data for JSON. KV capacities are None for an engine without a control plane."""
    instances, control, waiting = client.instances(), client.control, client.waiting_room()
    capacities = {} if control is None else control.state().capacities
    load = {
        "server_load": in_flight,
        **_figures(client.snapshot(), KVCapacity.total(capacities.values()) if capacities else None),
        "waiting_room": {
            "requests": waiting.count,
            "tokens": waiting.tokens,
            "longest_tokens": waiting.longest,
            "oldest_seconds": waiting.oldest_wait,
        },
        "policy": None if control is None else control.policy_in_force()["policy"],
    }
    if len(instances) > 1:
        load["instances"] = [
            {"engine": str(i.engine), "instance": i.name, **_figures(i.snapshot, capacities.get(i.name))}
            for i in instances
        ]
    return load


def _figures(snapshot: Snapshot, capacity: KVCapacity | None) -> dict[str, Any]:
    return {
        "running": snapshot.num_running,
        "waiting": snapshot.num_waiting,
        "waiting_tokens": snapshot.waiting_tokens,
        "kv_usage": snapshot.kv_usage,
        "kv_capacity_tokens": None if capacity is None else capacity.tokens,
        "kv_capacity_max_tokens": None if capacity is None else capacity.max_tokens,
        "kv_capacity_max_seconds": None if capacity is None else capacity.max_seconds,
        "plan_version": snapshot.plan_version,
    }
