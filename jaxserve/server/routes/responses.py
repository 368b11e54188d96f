"""/v1/responses: create, retrieve, cancel and delete responses, list their input, and count input tokens."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic_core import from_json

from jaxserve.core.errors import RequestError
from jaxserve.server.answers.prompts import count_prompt_tokens
from jaxserve.server.http.auth import key_number
from jaxserve.server.http.offload import off_loop_if_large
from jaxserve.server.http.streaming import EventStream, StreamFormat, while_connected
from jaxserve.server.responses.creation import begin_turn, create_response
from jaxserve.server.responses.store import Owner, StoredResponse
from jaxserve.server.routes.json_route import JsonRoute
from jaxserve.server.schemas.responses import ResponsesBody, responses_names
from jaxserve.server.state import State

router = APIRouter(tags=["generation"])
json_router = APIRouter(route_class=JsonRoute, tags=["generation"])

JSON = "application/json"
MAX_PAGE = 100  # items
# Clients know the end of a stream by its last event.
WRITTEN = StreamFormat(write=bytes, errors=lambda error: (), end=b"")


async def get_owner(request: Request, state: State) -> Owner:
    """Return whose responses a request may see, as a FastAPI dependency."""
    return key_number(request.scope, [key.encode() for key in state.settings.api_keys])


Client = Annotated[Owner, Depends(get_owner)]


@json_router.post("/v1/responses", response_model=None)
async def create(body: ResponsesBody, request: Request, state: State, owner: Client) -> Response:
    """Answer a conversation of items."""
    response = await create_response(state, body, owner, request)
    headers = {"x-request-id": response.id}
    if body.background:
        whole = await response.start()
        if body.stream:
            return await _follow(request, response.stored, -1, headers)
        return Response(whole, headers=headers, media_type=JSON)
    if body.stream:
        form = replace(WRITTEN, errors=response.fail)
        return await EventStream.start(request, response.stream(), headers, form)
    whole = await while_connected(request, response.whole())
    return Response(whole, headers=headers, media_type=JSON)


@json_router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: ResponsesBody, state: State, owner: Client) -> dict[str, Any]:
    """Return the number of tokens of the prompt that a response would have."""
    client = state.client()
    state.check_model(body.model)
    body.check()
    with responses_names(body):
        _, chat = await begin_turn(state, body, owner)
        await off_loop_if_large(body.repeated_size, state.formats().answer_format, chat, "")
        tokens = await count_prompt_tokens(client, chat, state.settings.template_defaults)
    return {"object": "response.input_tokens", "input_tokens": tokens}


@router.get("/v1/responses/{response_id}", response_model=None)
async def retrieve(
    response_id: str,
    request: Request,
    state: State,
    owner: Client,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
) -> Response:
    """Return a response, or the events of one in the background after the one with number `starting_after`."""
    stored = state.responses.get(response_id, owner)
    if not stream:
        return await _whole(stored)
    if stored.log is None:
        raise RequestError("stream needs a response that was created with background and stream", field="stream")
    return await _follow(request, stored, starting_after, {})


@router.post("/v1/responses/{response_id}/cancel", response_model=None)
async def cancel(response_id: str, state: State, owner: Client) -> Response:
    """End a response in the background, unless it has ended already, and return it."""
    stored = state.responses.get(response_id, owner)
    if not stored.background:
        raise RequestError("only responses that were created with background can be cancelled", field="response_id")
    if stored.running is not None:
        await stored.running.cancel()
    return await _whole(stored)


@router.delete("/v1/responses/{response_id}")
async def delete(response_id: str, state: State, owner: Client) -> dict[str, Any]:
    """Drop a response, and end it if it still runs."""
    stored = state.responses.delete(response_id, owner)
    if stored.running is not None:
        await stored.running.cancel()
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    state: State,
    owner: Client,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> dict[str, Any]:
    """Return the items that the model was given, those of earlier responses included, a page at a time."""
    stored = state.responses.get(response_id, owner)
    return await off_loop_if_large(stored.num_items, _page, stored, limit, order, after)


def _page(stored: StoredResponse, limit: int, order: str, after: str | None) -> dict[str, Any]:
    """Return the list of at most `limit` items after the one with the id `after`; None: from the first one on."""
    ids, items = stored.given()
    if order == "desc":
        ids, items = ids[::-1], items[::-1]
    if after is not None and after not in ids:
        raise RequestError("after is not the id of an input item of this response", field="after", value=after[:128])
    start = 0 if after is None else ids.index(after) + 1
    page = ids[start : start + limit]
    return {
        "object": "list",
        "data": [from_json(item) for item in items[start : start + limit]],
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
        "has_more": start + limit < len(ids),
    }


async def _follow(request: Request, stored: StoredResponse, after: int, headers: Mapping[str, str]) -> EventStream:
    form = replace(WRITTEN, errors=stored.follow_failure)
    return await EventStream.start(request, stored.follow(after), headers, form)


async def _whole(stored: StoredResponse) -> Response:
    return Response(stored.data if stored.running is None else await stored.running.written(), media_type=JSON)
