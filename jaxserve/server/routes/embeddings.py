"""POST /v1/embeddings."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from jaxserve.core.request import RequestOutput, TraceContext
from jaxserve.engine.client import TokensPrompt
from jaxserve.server.answers.embedding import embed_all, embedding_usage, first_values
from jaxserve.server.answers.generation import with_entries
from jaxserve.server.answers.prompts import render, tokens_prompts
from jaxserve.server.errors import rename_error_fields
from jaxserve.server.http.json_text import to_json
from jaxserve.server.http.offload import off_loop_if_large
from jaxserve.server.http.streaming import while_connected
from jaxserve.server.routes.json_route import JsonRoute
from jaxserve.server.schemas.common import prompt_tokens_to_keep
from jaxserve.server.schemas.other import EmbeddingBody
from jaxserve.server.schemas.prompts import parse_prompts
from jaxserve.server.state import ServerState, State, new_id

router = APIRouter(route_class=JsonRoute, tags=["embeddings"])


@router.post("/v1/embeddings", response_model=None)
async def embeddings(body: EmbeddingBody, request: Request, state: State) -> Response:
    """Return the pooled last hidden state of each input, or of a conversation."""
    client, model = state.client(), state.check_model(body.model)
    body.check(client.info.hidden_size)
    prompts = await _prompts(state, body)
    request_id = new_id("embd")
    trace = TraceContext("embeddings", request.headers)
    outputs = await while_connected(request, embed_all(client, prompts, request_id, body.priority, trace))
    response = {"object": "list", "model": model, "data": [], "usage": embedding_usage(prompts)}
    size = len(outputs) * client.info.hidden_size
    whole = await off_loop_if_large(size, _with_embeddings, response, outputs, body)
    return Response(whole, headers={"x-request-id": request_id}, media_type="application/json")


async def _prompts(state: ServerState, body: EmbeddingBody) -> list[TokensPrompt]:
    """Return the inputs, or the conversation, as prompts for the engine."""
    client, special = state.client(), body.add_special_tokens
    keep = prompt_tokens_to_keep(body.truncate_prompt_tokens, client.info.max_model_len)
    with rename_error_fields({"prompt": "messages" if body.messages else "input"}):
        if body.messages:
            texts: Sequence[str | tuple[int, ...]] = [await render(client, body, state.settings.template_defaults)]
            special = bool(special)
        else:
            texts = parse_prompts(body.input, "input", state.settings.max_prompts)
        return await tokens_prompts(client, texts, add_special_tokens=special is not False, keep=keep, generates=False)


def _with_embeddings(response: dict[str, Any], outputs: list[RequestOutput], body: EmbeddingBody) -> bytes:
    entries = (
        {"object": "embedding", "index": i, "embedding": _encode(output.embedding, body)}
        for i, output in enumerate(outputs)
    )
    # One at a time, since to_json holds the interpreter's lock.
    return with_entries(response, "data", [to_json(entry) for entry in entries])


def _encode(embedding: Any, body: EmbeddingBody) -> list[float] | str:
    values = first_values(np.asarray(embedding, dtype="<f4"), body.dimensions)
    return base64.b64encode(values.tobytes()).decode() if body.encoding_format == "base64" else values.tolist()
