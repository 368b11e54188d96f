"""The beginning of a response: its conversation, from the input and what is kept, and the work for the engine."""

import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import NamedTuple

from pydantic_core import from_json
from starlette.requests import Request

from jaxserve.core.errors import ContextLengthExceeded, RequestError
from jaxserve.server.answers.conversation import ConversationJob, conversation_job
from jaxserve.server.http.auth import sender_of
from jaxserve.server.http.offload import off_loop_if_large
from jaxserve.server.responses.events import ResponseEvents
from jaxserve.server.responses.items import Shown
from jaxserve.server.responses.running import RunningResponse
from jaxserve.server.responses.store import Owner, StoredResponse, Turn, parsed
from jaxserve.server.schemas.chat import ChatBody
from jaxserve.server.schemas.response_items import INSTRUCTING, REFERENCE, Item, item_type, kept_item
from jaxserve.server.schemas.responses import SEALED_REASONING, ResponsesBody, responses_names
from jaxserve.server.state import ServerState

PREVIOUS = "previous_response_id"  # the place of items that earlier responses have
# Of a conversation: those of the input, of earlier turns, and those referred to. A body has room for fewer.
MAX_ITEMS = 20_000
ITEM_SIZE = 64  # how much the translation of an item costs, compared to a character of JSON


class Size(NamedTuple):
    """The size of a conversation, or of a part that the server keeps: items, and bytes of their JSON."""

    items: int
    data: int

    def exceeds(self, limit: "Size") -> bool:
        """Return whether this size is beyond a limit."""
        return self.items > limit.items or self.data > limit.data


async def create_response(state: ServerState, body: ResponsesBody, owner: Owner, request: Request) -> RunningResponse:
    """Return a response that can be generated. Raise RequestError if the body breaks a limit."""
    model, store = state.check_model(body.model), state.responses
    body.check()
    stores = body.store and store.enabled
    if body.background and not stores:
        raise RequestError(
            "background needs a server that keeps responses (--max-stored-responses)", field="background"
        )
    id = f"resp_{uuid.uuid4().hex}"
    names = partial(responses_names, body)
    with names():
        turn, chat = await begin_turn(state, body, owner)
        sender = sender_of(request.scope, state.settings.api_keys)
        make = partial(conversation_job, state, request_id=id, headers=request.headers, sender=sender, names=names)
        work = await _fitting(make, chat) if body.truncation == "auto" else await make(chat)
    params = work.job.params[0]
    head = {
        "id": id,
        "object": "response",
        "created_at": state.timestamp(),
        "model": model,
        **body.repeated(),
        "store": stores,
        "temperature": params.temperature,
        "top_p": params.top_p,
    }
    sealed = SEALED_REASONING in (body.include or ())
    shown = Shown(body.num_logprobs, sealed, {tool.known_as: tool for tool in body.client_tools()})
    events = ResponseEvents(head, work, shown, state.timestamp)
    stored = None
    if stores:
        log: list[bytes] | None = [] if body.background and body.stream else None
        stored = StoredResponse(id, turn, len(turn.items), background=body.background, log=log)
    return RunningResponse(work, events, store, stored, body.repeated_size)


async def begin_turn(state: ServerState, body: ResponsesBody, owner: Owner) -> tuple[Turn, ChatBody]:
    """Return the turn that a body begins, and the chat completion that answers it.

    Raise RequestError if an item is not valid, if what it refers to is not kept, or if the conversation has more items
    or more bytes than a client could send.
    """
    store = state.responses
    previous = store.previous(body.previous_response_id, owner)
    items = body.items()
    ids = [id for item in items if item.get("type") in (None, REFERENCE) and isinstance(id := item.get("id"), str)]
    referred = {id: store.item(id, owner) for id in ids}
    sent = Size(len(items), sum(len(referred[id] or b"") for id in ids))
    most = Size(MAX_ITEMS, state.settings.max_body_bytes)
    history = _history(previous, sent, most, cut=body.truncation == "auto")

    def translate() -> tuple[Turn, ChatBody]:
        placed = [(f"input.{index}", item) for index, item in enumerate(items)]
        placed = [(place, _resolved(item, place, referred)) for place, item in placed]
        turn = Turn(owner, previous)
        chat = body.chat_body([*((PREVIOUS, item) for item in parsed(history)), *placed])
        for _, item in placed:
            turn.add([kept_item(item, turn.items)])
        return turn, chat

    size = sum(turn.booked for turn in history) + sent.data
    return await off_loop_if_large(size + ITEM_SIZE * len(items), translate)


def _history(previous: Turn | None, sent: Size, most: Size, *, cut: bool) -> list[Turn]:
    """Return the turns of a conversation that a request continues, the first one first.

    Raise RequestError if they have more items or bytes than `most`, together with what the request has `sent`. With
    `cut`, leave out the oldest turns instead.
    """
    turns: list[Turn] = []
    size, turn = sent, previous
    while turn is not None and not size.exceeds(most):
        size = Size(size.items + len(turn.items), size.data + sum(map(len, turn.items.values())))
        if not (cut and size.exceeds(most)):
            turns.append(turn)
        turn = turn.previous
    if sent.exceeds(most) or (size.exceeds(most) and not cut):
        field = "input" if sent.exceeds(most) else PREVIOUS
        raise ContextLengthExceeded(
            f"{field}: the conversation has at least {size.items} items and {size.data} bytes, the limits are "
            f"{most.items} items and {most.data} bytes (--max-body-mb)",
            field=field,
            value=size.items if size.items > most.items else size.data,
            limit=most.items if size.items > most.items else most.data,
        )
    return turns[::-1]


def _resolved(item: Item, place: str, referred: Mapping[str, bytes | None]) -> Item:
    """Return the item, or the one to which it refers. Raise RequestError if that is not kept."""
    if item_type(item, place) != REFERENCE:
        return item
    id, field = item.get("id"), f"{place}.id"
    data = referred.get(id) if isinstance(id, str) else None
    if data is None:
        raise RequestError(f"{field} is not the id of an item that is kept here", field=field, value=id)
    found: Item = from_json(data)
    return found


async def _fitting(make: Callable[[ChatBody], Awaitable[ConversationJob]], chat: ChatBody) -> ConversationJob:
    """Return the work that `make` returns for as many of the last turns of a conversation as fit the model's context.

    Turns begin with messages of the user. Instructions at the beginning stay. Raise ContextLengthExceeded if even the
    last turn does not fit.
    """
    try:
        return await make(chat)
    except ContextLengthExceeded as error:
        too_long = error
    messages = chat.messages
    first = int(messages[0].role in INSTRUCTING)
    starts = [index for index, message in enumerate(messages) if message.role == "user" and index > first]
    fitting: ConversationJob | None = None
    low, high = 0, len(starts)
    while low < high:  # the first start that fits is one of starts[low:high], or none is left
        middle = (low + high) // 2
        rest = [*messages[:first], *messages[starts[middle] :]]
        try:
            fitting = await make(chat.model_copy(update={"messages": rest}))
            high = middle
        except ContextLengthExceeded as error:
            too_long, low = error, middle + 1
    if fitting is None:
        raise too_long
    return fitting
