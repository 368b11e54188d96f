"""What is measured, and how times become numbers.

Every generation is greedy, ignores end-of-sequence, and gets prompts of fresh random token ids, so that no prefix cache
can help. With T(n) the time to generate n tokens for a batch of prompts:

- decode step = (T(1 + STEPS) - T(1)) / STEPS, from prompts of DECODE_PROMPT tokens, at each batch size;
- prefill tokens/s = PREFILL_BATCH * PREFILL_PROMPT / T(1).
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import numpy as np

VOCAB = 32000
DECODE_PROMPT = 32
STEPS = 64
PREFILL_BATCH, PREFILL_PROMPT = 4, 512
MAX_LENGTH = 640  # of any sequence, prompt included

Prompts = list[list[int]]
Seconds = Callable[[int, int, int], float]
"""How long an engine takes to generate: sequences, tokens of each prompt, tokens of each answer."""


class Engine(Protocol):
    """One engine with a checkpoint loaded.

    `weight_bytes`: what a decode step reads of it, all layers and the head, as the engine keeps them.
    """

    weight_bytes: int

    def generate(self, prompts: Prompts, max_tokens: int) -> list[list[int]]:
        """The `max_tokens` greedy tokens of each prompt."""
        ...


def cases(batches: Iterable[int]) -> dict[str, Callable[[Seconds], float]]:
    """What a case says, measured once: a decode step in ms by batch size ("decode_1", ...), "prefill" in tokens/s."""
    return {f"decode_{batch}": partial(_decode_step, batch) for batch in batches} | {"prefill": _prefill}


def _decode_step(batch: int, seconds: Seconds) -> float:
    return (seconds(batch, DECODE_PROMPT, 1 + STEPS) - seconds(batch, DECODE_PROMPT, 1)) / STEPS * 1e3


def _prefill(seconds: Seconds) -> float:
    return PREFILL_BATCH * PREFILL_PROMPT / seconds(PREFILL_BATCH, PREFILL_PROMPT, 1)


def first_tokens(engine: Engine) -> list[int]:
    """The first greedy token after each of PREFILL_BATCH * 8 fixed prompts: the same model gives mostly the same ones.

    Not all: with random weights the best logits lie close together, and engines round bf16 at different places.
    """
    rng = np.random.default_rng(2)
    prompts = rng.integers(2, VOCAB, (8, PREFILL_BATCH, DECODE_PROMPT)).tolist()
    return [token for batch in prompts for (token,) in engine.generate(batch, 1)]


def generation(engine: Engine, rng: np.random.Generator, batch: int, length: int, max_tokens: int) -> float:
    """Seconds of one generation; fails if the engine did not produce what it was asked for."""
    prompts = rng.integers(2, VOCAB, (batch, length)).tolist()
    start = time.perf_counter()
    answers = engine.generate(prompts, max_tokens)
    seconds = time.perf_counter() - start
    lengths = [len(answer) for answer in answers]
    if lengths != [max_tokens] * batch:
        raise RuntimeError(f"asked for {batch} answers of {max_tokens} tokens, got {lengths}")
    return seconds
