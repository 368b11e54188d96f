"""POST /v1/chat/completions."""

from fastapi import APIRouter, Request, Response

from jaxserve.core.request import TraceContext
from jaxserve.engine.limits import cap_max_tokens, check_params
from jaxserve.server.chat import ChatResponse
from jaxserve.server.errors import rename_error_fields
from jaxserve.server.generation import Job
from jaxserve.server.prompts import conversation_prompt
from jaxserve.server.routes.json_route import JsonRoute
from jaxserve.server.schemas.chat import ChatBody
from jaxserve.server.schemas.common import answer_tokens, prompt_tokens_to_keep
from jaxserve.server.state import State, new_id
from jaxserve.server.streaming import EventStream, while_connected

router = APIRouter(route_class=JsonRoute, tags=["generation"])


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatBody, request: Request, state: State) -> Response:
    """Answer a conversation."""
    client, model = state.client(), state.check_model(body.model)
    body.check()
    keep = prompt_tokens_to_keep(body.truncate_prompt_tokens, client.info.max_model_len - max(body.token_limit or 1, 1))
    prompt = await conversation_prompt(client, body, add_special_tokens=body.add_special_tokens, keep=keep)
    length = len(prompt.token_ids)
    limit = answer_tokens(body.token_limit, client.info.max_model_len - length, clamp=state.settings.clamp_max_tokens)
    limit = cap_max_tokens(client.info, limit, length)
    with rename_error_fields(body.client_names):
        params = body.sampling_params(client.info.default_sampling, max_tokens=limit, logprobs=body.num_logprobs)
        check_params(client.info, params, length)
    trace = TraceContext("chat", request.headers)
    job = Job(new_id("chatcmpl"), [prompt], [params], body.priority, body.cache_salt or "", trace)
    response = ChatResponse(client, job, body, model, state.timestamp())
    headers = {"x-request-id": job.id}
    if body.stream:
        return await EventStream.start(request, response.events(), headers)
    whole = await while_connected(request, response.whole())
    return Response(whole, headers=headers, media_type="application/json")
