"""POST /tokenize and /detokenize."""

from fastapi import APIRouter, Response

from jaxserve.engine.client import EngineClient
from jaxserve.engine.limits import check_vocabulary
from jaxserve.server.answers.prompts import encode, render
from jaxserve.server.errors import json_response, rename_error_fields
from jaxserve.server.http.offload import off_loop_if_large
from jaxserve.server.routes.json_route import JsonRoute
from jaxserve.server.schemas.other import DetokenizeBody, TokenizeBody
from jaxserve.server.state import State

router = APIRouter(route_class=JsonRoute, tags=["tokens"])


@router.post("/tokenize", response_model=None)
async def tokenize(body: TokenizeBody, state: State) -> Response:
    """Return the token ids of a prompt or a conversation."""
    client = state.client()
    state.check_model(body.model)
    body.check()
    special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
    with rename_error_fields({"prompt": "messages"} if body.prompt is None else {}):
        text = await render(client, body, state.settings.template_defaults) if body.prompt is None else body.prompt
        (encoded,) = await encode(client, [text], add_special_tokens=special)
        check_vocabulary(client.info, "prompt", encoded.token_ids)
    tokens = encoded.token_ids
    return await off_loop_if_large(len(tokens), _tokens_answer, client, tokens, body.return_token_strs)


@router.post("/detokenize", response_model=None)
async def detokenize(body: DetokenizeBody, state: State) -> Response:
    """Return the text of token ids."""
    client = state.client()
    state.check_model(body.model)
    body.check()
    return await off_loop_if_large(len(body.tokens), _text_answer, client, body.tokens)


def _tokens_answer(client: EngineClient, tokens: list[int], with_strings: bool) -> Response:
    answer = {"count": len(tokens), "max_model_len": client.info.max_model_len, "tokens": tokens}
    if with_strings:
        answer["token_strs"] = [client.tokenizer.token(token) for token in tokens]
    return json_response(answer)


def _text_answer(client: EngineClient, tokens: list[int]) -> Response:
    check_vocabulary(client.info, "tokens", tokens)
    return json_response({"prompt": client.tokenizer.decode(tokens, skip_special_tokens=False)})
