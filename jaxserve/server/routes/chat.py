"""POST /v1/chat/completions."""

from fastapi import APIRouter, Request, Response

from jaxserve.server.answers.chat import ChatResponse
from jaxserve.server.answers.conversation import conversation_job
from jaxserve.server.http.auth import sender_of
from jaxserve.server.http.streaming import EventStream, while_connected
from jaxserve.server.routes.json_route import JsonRoute
from jaxserve.server.schemas.chat import ChatBody
from jaxserve.server.state import State, new_id

router = APIRouter(route_class=JsonRoute, tags=["generation"])


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatBody, request: Request, state: State) -> Response:
    """Answer a conversation."""
    model = state.check_model(body.model)
    sender = sender_of(request.scope, state.settings.api_keys)
    work = await conversation_job(state, body, request_id=new_id("chatcmpl"), headers=request.headers, sender=sender)
    response = ChatResponse(work.client, work.job, body, model, state.timestamp(), form=work.form)
    headers = {"x-request-id": work.job.id}
    if body.stream:
        return await EventStream.start(request, response.events(), headers)
    whole = await while_connected(request, response.whole())
    return Response(whole, headers=headers, media_type="application/json")
