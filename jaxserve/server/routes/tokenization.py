"""POST /tokenize and /detokenize."""

from fastapi import APIRouter, Response

from jaxserve.core.errors import RequestError
from jaxserve.server.errors import json_response
from jaxserve.server.prompts import encode, render
from jaxserve.server.routes.json_route import JsonRoute
from jaxserve.server.schemas.other import DetokenizeBody, TokenizeBody
from jaxserve.server.state import State

router = APIRouter(route_class=JsonRoute, tags=["tokens"])


@router.post("/tokenize", response_model=None)
async def tokenize(body: TokenizeBody, state: State) -> Response:
    """The token ids of a prompt or a conversation."""
    client = state.client()
    state.check_model(body.model)
    body.check()
    if body.prompt is None:
        text, special = render(client, body), False
    else:
        text, special = body.prompt, True
    if body.add_special_tokens is not None:
        special = body.add_special_tokens
    (tokens,) = await encode(client, [text], add_special_tokens=special)
    response = {"count": len(tokens), "max_model_len": client.info.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        response["token_strs"] = [client.tokenizer.token(token) for token in tokens]
    return json_response(response)


@router.post("/detokenize", response_model=None)
async def detokenize(body: DetokenizeBody, state: State) -> Response:
    """The text of token ids."""
    client = state.client()
    state.check_model(body.model)
    size = client.info.vocab_size
    wrong = next((token for token in body.tokens if not 0 <= token < size), None)
    if wrong is not None:
        message = f"tokens has the token id {wrong}, the vocabulary goes from 0 to {size - 1}"
        raise RequestError(message, field="tokens", value=wrong, limit=size - 1)
    return json_response({"prompt": client.tokenizer.decode(body.tokens, skip_special_tokens=False)})
