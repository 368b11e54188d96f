"""GET /v1/models and /v1/models/{name}, in OpenAI's form or, for clients of Anthropic's API, in Anthropic's."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from jaxserve.core.errors import RequestError
from jaxserve.server.messages.errors import is_anthropic
from jaxserve.server.messages.models import MAX_PAGE, model_card, page_of
from jaxserve.server.state import ServerState, State

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(
    request: Request,
    state: State,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    before_id: str | None = None,
    after_id: str | None = None,
) -> dict[str, Any]:
    """Return the served model under each of its names. Only Anthropic's form has pages."""
    cards = [_card_form(request)(state, name) for name in state.model_names()]
    if not is_anthropic(request.scope):
        return {"object": "list", "data": cards}
    if before_id is not None and after_id is not None:
        raise RequestError("give either before_id or after_id, not both", field="before_id", value=before_id[:128])
    return page_of(cards, limit, before_id=before_id, after_id=after_id)


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str, state: State) -> dict[str, Any]:
    """Return one model by name."""
    # The path has lost slashes at its ends.
    served = {known.strip("/"): known for known in state.model_names()}
    return _card_form(request)(state, state.check_model(served.get(name, name)))


def _card_form(request: Request) -> Callable[[ServerState, str], dict[str, Any]]:
    return _anthropic_card if is_anthropic(request.scope) else _card


def _card(state: ServerState, name: str) -> dict[str, Any]:
    info = state.client().info
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": "jaxserve",
        "root": info.name,
        "max_model_len": info.max_model_len,
        "capabilities": state.capabilities(),
    }


def _anthropic_card(state: ServerState, name: str) -> dict[str, Any]:
    info = state.client().info
    return model_card(name, created=info.created, max_tokens=info.max_model_len)
