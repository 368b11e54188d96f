"""Measurements through the `generate` of any engine, jaxserve or a peer, without importing JAX or torch.

Every prompt consists of fresh random tokens. With T(n) the time to generate n tokens for a batch: decode step = (T(1 +
steps) - T(1)) / steps, or an error if that is not positive; prefill = T(1). Each case runs once unmeasured, once more
if that made the engine prepare something in the background, and then `repeats` times. T is the median.
"""

import statistics
import time
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from bench.gpu_parts import Row, costs
from bench.gpu_parts.sizes import Model, Sizes
from bench.peers.workload import VOCAB, Prompts, first_tokens

BELOW_NOISE = "more tokens took no longer than one: the machine's noise is above the steps' time"


class Engine(Protocol):
    """An engine with a loaded model."""

    def generate(self, prompts: Prompts, max_tokens: int) -> list[list[int]]:
        """Return `max_tokens` greedy tokens for each prompt."""
        ...


def rows(engine: Engine, model: Model, sizes: Sizes, rng: np.random.Generator, labels: Row) -> Iterator[Row]:
    """Yield decode, prefill, throughput, and the first tokens of fixed prompts. `labels` are part of every row."""
    yield from decode(engine, model, sizes, rng, labels)
    yield from prefill(engine, model, sizes, rng, labels)
    yield throughput(engine, model, sizes, rng, labels)
    yield {"case": "first_tokens", **labels, "tokens": first_tokens(engine)}


def decode(engine: Engine, model: Model, sizes: Sizes, rng: np.random.Generator, labels: Row) -> Iterator[Row]:
    """Yield the seconds of one decode step for each batch size, or an error if noise hides them."""
    context = sizes.decode_prompt + sizes.steps // 2
    for batch in model.batches:
        lengths = [sizes.decode_prompt] * batch
        first = median(engine, lengths, 1, model.repeats, rng)
        whole = median(engine, lengths, 1 + sizes.steps, model.repeats, rng)
        row = {"case": f"decode, batch {batch}", **labels, **costs.decode(model, batch, context).fields}
        if whole > first:
            seconds = (whole - first) / sizes.steps
            yield {**row, "seconds": seconds, "tok_s": batch / seconds}
        else:
            yield {**row, "error": BELOW_NOISE}


def prefill(engine: Engine, model: Model, sizes: Sizes, rng: np.random.Generator, labels: Row) -> Iterator[Row]:
    """Yield the seconds until every prompt has its first token."""
    for count, length in sizes.prefills:
        seconds = median(engine, [length] * count, 1, model.repeats, rng)
        cost = costs.prefill(model, count, length).fields
        case = f"prefill, {count} x {length}"
        yield {"case": case, **labels, "seconds": seconds, "tok_s": count * length / seconds, **cost}


def throughput(engine: Engine, model: Model, sizes: Sizes, rng: np.random.Generator, labels: Row) -> Row:
    """Return the throughput of many simultaneous requests with prompts of different lengths."""
    low, high = sizes.request_lens
    lengths = np.random.default_rng(3).integers(low, high + 1, model.requests).tolist()  # the same for every engine
    seconds = median(engine, lengths, sizes.answer, 1, rng)
    read, generated = sum(lengths), model.requests * sizes.answer
    return {
        "case": f"throughput, {model.requests} requests",
        **labels,
        "seconds": seconds,
        "input_tokens": read,
        "tok_s": generated / seconds,
        "total_tok_s": (read + generated) / seconds,
        "requests_per_s": model.requests / seconds,
    }


def median(engine: Engine, lengths: list[int], max_tokens: int, repeats: int, rng: np.random.Generator) -> float:
    """Return the median time of a batch of prompts with these lengths, after one unmeasured run."""

    def once() -> float:
        prompts = [rng.integers(2, VOCAB, length).tolist() for length in lengths]
        return timed(engine, prompts, max_tokens)

    once()
    return statistics.median(once() for _ in range(repeats))


def timed(engine: Engine, prompts: Prompts, max_tokens: int) -> float:
    """Return the seconds of one generation.

    Raise RuntimeError if an answer does not have `max_tokens` tokens.
    """
    start = time.perf_counter()
    answers = engine.generate(prompts, max_tokens)
    seconds = time.perf_counter() - start
    lengths = [len(answer) for answer in answers]
    if lengths != [max_tokens] * len(prompts):
        raise RuntimeError(f"asked for {len(prompts)} answers of {max_tokens} tokens, got {lengths}")
    return seconds
