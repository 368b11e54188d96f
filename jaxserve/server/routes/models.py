"""GET /v1/models and /v1/models/{name}."""

from typing import Any

from fastapi import APIRouter

from jaxserve.server.state import ServerState, State

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(state: State) -> dict[str, Any]:
    """Return the served model under each of its names."""
    return {"object": "list", "data": [_card(state, name) for name in state.model_names()]}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, state: State) -> dict[str, Any]:
    """Return one model by name."""
    # The path has lost slashes at its ends.
    served = {known.strip("/"): known for known in state.model_names()}
    return _card(state, state.check_model(served.get(name, name)))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    info = state.client().info
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": "jaxserve",
        "root": info.name,
        "max_model_len": info.max_model_len,
    }
