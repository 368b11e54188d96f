"""/v1/responses: create, retrieve, cancel and delete responses, list their input, and count input tokens."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic_core import from_json

from jaxserve.core.errors import RequestError
from jaxserve.server.answers.prompts import encode, render
from jaxserve.server.errors import json_response
from jaxserve.server.http.auth import key_number
from jaxserve.server.http.streaming import EventStream, StreamFormat, named_event, while_connected
from jaxserve.server.responses.creation import begin_turn, create_response
from jaxserve.server.responses.store import Owner, StoredResponse
from jaxserve.server.routes.json_route import JsonRoute
from jaxserve.server.schemas.responses import ResponsesBody, responses_names
from jaxserve.server.state import State

router = APIRouter(tags=["generation"])
json_router = APIRouter(route_class=JsonRoute, tags=["generation"])

JSON = "application/json"
# Clients know the end of a stream by its last event.
FROM_LOG = StreamFormat(write=bytes, errors=lambda error: (), end=b"")


async def get_owner(request: Request, state: State) -> Owner:
    """Return whose responses a request may see, as a FastAPI dependency."""
    return key_number(request.scope, [key.encode() for key in state.settings.api_keys])


Client = Annotated[Owner, Depends(get_owner)]


@json_router.post("/v1/responses", response_model=None)
async def create(body: ResponsesBody, request: Request, state: State, owner: Client) -> Response:
    """Answer a conversation of items."""
    response = await create_response(state, body, owner, request.headers)
    headers = {"x-request-id": response.id}
    if body.background:
        response.start()
        if body.stream:
            return await EventStream.start(request, response.follow(-1), headers, FROM_LOG)
        return json_response(response.events.response(), headers=headers)
    if body.stream:
        form = StreamFormat(named_event, response.fail, b"")
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
        _, chat = await begin_turn(state.responses, body, owner)
        state.formats().answer_format(chat, "")
        text = await render(client, chat)
        (encoded,) = await encode(client, [text], add_special_tokens=False)
    return {"object": "response.input_tokens", "input_tokens": len(encoded.token_ids)}


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
        return _whole(stored)
    if stored.log is None:
        raise RequestError("stream needs a response that was created with background and stream", field="stream")
    return await EventStream.start(request, stored.follow(starting_after), {}, FROM_LOG)


@router.post("/v1/responses/{response_id}/cancel", response_model=None)
async def cancel(response_id: str, state: State, owner: Client) -> Response:
    """End a response in the background, unless it has ended already, and return it."""
    stored = state.responses.get(response_id, owner)
    if not stored.background:
        raise RequestError("only responses that were created with background can be cancelled", field="response_id")
    if stored.running is not None:
        await stored.running.cancel()
    return _whole(stored)


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
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> dict[str, Any]:
    """Return the items that the model was given, those of earlier responses included, a page at a time."""
    ids, items = state.responses.get(response_id, owner).given()
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


def _whole(stored: StoredResponse) -> Response:
    if stored.running is None:
        return Response(stored.data, media_type=JSON)
    return json_response(stored.running.events.response())
