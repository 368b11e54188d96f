"""POST /v1/messages and /v1/messages/count_tokens, as in Anthropic's API."""

import uuid
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from jaxserve.server.answers.conversation import conversation_job
from jaxserve.server.answers.prompts import count_prompt_tokens
from jaxserve.server.errors import json_response, rename_error_fields, response_parts
from jaxserve.server.http.auth import sender_of
from jaxserve.server.http.offload import off_loop_if_large
from jaxserve.server.http.streaming import EventStream, StreamFormat, named_event, while_connected
from jaxserve.server.messages.errors import MESSAGES, announcing_long_prompts, messages_error, new_request_id
from jaxserve.server.messages.response import MessageResponse
from jaxserve.server.routes.json_route import JsonRoute
from jaxserve.server.schemas.chat import ChatBody
from jaxserve.server.schemas.messages import MessagesBody, PromptBody
from jaxserve.server.state import ServerState, State

router = APIRouter(route_class=JsonRoute, tags=["generation"])
PING = named_event({"type": "ping"})


@router.post(MESSAGES, response_model=None)
async def messages(body: MessagesBody, request: Request, state: State) -> Response:
    """Answer a conversation."""
    model = state.check_model(body.model)
    chat = await _chat(state, body)
    names, id = partial(rename_error_fields, body.client_names), f"msg_{uuid.uuid4().hex}"
    with names(), announcing_long_prompts():
        sender = sender_of(request.scope, state.settings.api_keys)
        work = await conversation_job(state, chat, request_id=id, headers=request.headers, sender=sender, names=names)
    response = MessageResponse(work.client, work.job, body, model, work.form)
    request_id = new_request_id()
    headers = {"request-id": request_id, "x-request-id": work.job.id}
    if body.stream:
        form = StreamFormat(named_event, lambda error: [_error_event(error, request_id)], end=b"", ping=PING)
        return await EventStream.start(request, response.events(), headers, form)
    whole = await while_connected(request, response.whole())
    return Response(whole, headers=headers, media_type="application/json")


@router.post(f"{MESSAGES}/count_tokens", response_model=None)
async def count_tokens(body: PromptBody, state: State) -> Response:
    """Count the tokens of a conversation."""
    client = state.client()
    state.check_model(body.model)
    chat = await _chat(state, body)
    with rename_error_fields({"prompt": "messages", **body.client_names}), announcing_long_prompts():
        tokens = await count_prompt_tokens(client, chat, state.settings.template_defaults)
    return json_response({"input_tokens": tokens}, headers={"request-id": new_request_id()})


async def _chat(state: ServerState, body: PromptBody) -> ChatBody:
    """Return the chat completion that a body means."""
    reasons, tokenizer = state.formats().reasoning is not None, state.client().tokenizer
    chat = partial(body.chat, reasons=reasons, late_system=tokenizer.takes_late_system_messages)
    return await off_loop_if_large(body.size, chat)


def _error_event(error: Exception, request_id: str) -> dict[str, Any]:
    status, body, _ = response_parts(error)
    return messages_error(status, body, request_id)[1]
