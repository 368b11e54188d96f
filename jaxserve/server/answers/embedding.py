"""The embeddings of all inputs of one HTTP request, and their similarity."""

import asyncio
from collections.abc import Sequence

import numpy as np

from jaxserve.core.request import RequestOutput, TraceContext
from jaxserve.engine.client import EngineClient, TokensPrompt
from jaxserve.server.answers.generation import queue_batches


async def embed_all(
    client: EngineClient, prompts: Sequence[TokensPrompt], request_id: str, priority: int, trace: TraceContext
) -> list[RequestOutput]:
    """Return all embeddings. At the first error, abort the remaining inputs and raise it."""
    tasks: list[asyncio.Task[RequestOutput]] = []
    try:
        for batch in queue_batches(client.info, prompts):
            async with asyncio.TaskGroup() as group:
                for i in batch:
                    embed = client.embed(prompts[i], request_id=f"{request_id}-{i}", priority=priority, trace=trace)
                    tasks.append(group.create_task(embed))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def embedding_usage(prompts: Sequence[TokensPrompt]) -> dict[str, int]:
    """Return OpenAI's usage object for inputs that are embedded."""
    tokens = sum(len(prompt.token_ids) for prompt in prompts)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def first_values(embedding: np.ndarray, dimensions: int | None) -> np.ndarray:
    """Return the first values of an embedding, scaled to length 1. `dimensions`: their number, None for all as is.

    Models that were trained for it (Matryoshka embeddings) put the most important values first.
    """
    if dimensions is None or dimensions >= len(embedding):
        return embedding
    first = embedding[:dimensions]
    length = np.linalg.norm(first)
    return first / length if length > 0 else first


def similarities(left: Sequence[RequestOutput], right: Sequence[RequestOutput]) -> list[float]:
    """Return the cosine of each pair of embeddings. One on the left is paired with all others."""
    a, b = (np.stack([np.asarray(output.embedding, np.float64) for output in side]) for side in (left, right))
    # Their length is 1 only as far as float32 goes.
    a, b = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in (a, b))
    cosines: list[float] = (a * b).sum(axis=1).clip(-1, 1).tolist()
    return cosines
