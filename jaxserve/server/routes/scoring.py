"""POST /v1/score and /v1/rerank: similarities of texts, which are the cosines of their embeddings."""

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from jaxserve.core.request import TraceContext
from jaxserve.engine.client import EngineClient, TokensPrompt
from jaxserve.server.answers.embedding import embed_all, embedding_usage, similarities
from jaxserve.server.answers.prompts import first_tokens, tokens_prompts
from jaxserve.server.errors import rename_error_fields
from jaxserve.server.http.json_text import to_json
from jaxserve.server.http.offload import off_loop_if_large
from jaxserve.server.http.streaming import while_connected
from jaxserve.server.routes.json_route import JsonRoute
from jaxserve.server.schemas.common import prompt_tokens_to_keep
from jaxserve.server.schemas.other import EmbeddedBody
from jaxserve.server.schemas.prompts import parse_prompts
from jaxserve.server.schemas.scoring import Document, RerankBody, ScoreBody, Side, texts_of
from jaxserve.server.state import ServerState, State, new_id

router = APIRouter(route_class=JsonRoute, tags=["embeddings"])


@router.post("/v1/score", response_model=None)
@router.post("/score", response_model=None, include_in_schema=False)
async def score(body: ScoreBody, request: Request, state: State) -> Response:
    """Return the similarity of each pair of texts."""
    model = state.check_model(body.model)
    sides = body.sides(state.settings.max_prompts)
    answer = {"id": new_id("score"), "object": "list", "created": state.timestamp(), "model": model}
    return await _compared(body, request, state, sides, answer, _score_entries)


@router.post("/v1/rerank", response_model=None)
@router.post("/rerank", response_model=None, include_in_schema=False)
async def rerank(body: RerankBody, request: Request, state: State) -> Response:
    """Return the documents that are most similar to a query, the most similar one first."""
    return await _rerank(body, request, state, with_documents=body.return_documents is not False)


@router.post("/v2/rerank", response_model=None, include_in_schema=False)
async def rerank_without_documents(body: RerankBody, request: Request, state: State) -> Response:
    """Do the same as /v1/rerank, and as in Cohere's second version return no documents unless asked to."""
    return await _rerank(body, request, state, with_documents=body.return_documents is True)


async def _rerank(body: RerankBody, request: Request, state: State, *, with_documents: bool) -> Response:
    model = state.check_model(body.model)
    body.check()
    texts = parse_prompts(texts_of(body.documents), "documents", state.settings.max_prompts)
    if body.max_tokens_per_doc is not None:
        special = body.add_special_tokens is not False
        documents = texts_of(body.documents)
        texts = await first_tokens(state.client(), documents, body.max_tokens_per_doc, add_special_tokens=special)
    sides = ("query", list(texts_of([body.query]))), ("documents", texts)
    answer = {"id": new_id("rerank"), "model": model}
    shown = body.documents if with_documents else None
    return await _compared(body, request, state, sides, answer, partial(_ranking, body.top_n, shown))


async def _compared(
    body: EmbeddedBody,
    request: Request,
    state: ServerState,
    sides: tuple[Side, Side],
    answer: dict[str, Any],
    entries: Callable[[list[float]], dict[str, Any]],
) -> Response:
    """Return `answer` with its usage, and with the `entries` that are made of the similarities of the two sides."""
    client = state.client()
    left, right = [await _prompts(client, body, side) for side in sides]
    prompts = [*left, *right]
    trace = TraceContext("embeddings", request.headers)
    outputs = await while_connected(request, embed_all(client, prompts, answer["id"], body.priority, trace))

    def write() -> bytes:
        scores = similarities(outputs[: len(left)], outputs[len(left) :])
        return to_json(answer | {"usage": embedding_usage(prompts)} | entries(scores))

    size = len(outputs) * client.info.hidden_size
    whole = await off_loop_if_large(size, write)
    return Response(whole, headers={"x-request-id": answer["id"]}, media_type="application/json")


async def _prompts(client: EngineClient, body: EmbeddedBody, side: Side) -> list[TokensPrompt]:
    field, texts = side
    keep = prompt_tokens_to_keep(body.truncate_prompt_tokens, client.info.max_model_len)
    with rename_error_fields({"prompt": field}):
        special = body.add_special_tokens is not False
        return await tokens_prompts(client, texts, add_special_tokens=special, keep=keep, generates=False)


def _score_entries(scores: list[float]) -> dict[str, Any]:
    return {"data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]}


def _ranking(top_n: int, documents: list[str | Document] | None, scores: list[float]) -> dict[str, Any]:
    """Return the `top_n` best results (0: all), with their documents if these are given."""
    ranked = sorted(range(len(scores)), key=lambda i: -scores[i])[: top_n or None]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in ranked]
    for result in results if documents is not None else ():
        document = documents[result["index"]]
        result["document"] = {"text": document} if isinstance(document, str) else document.as_dict()
    return {"results": results}
