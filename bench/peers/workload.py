"""What is measured, and how times become numbers.

Every generation is greedy, ignores end-of-sequence, and gets prompts of fresh random token ids, so that no prefix cache
can help. With T(n) the time to generate n tokens for a batch of prompts:

- decode step = (T(1 + steps) - T(1)) / steps, from prompts of `decode` tokens, at each batch size;
- prefill tokens/s = PREFILL_BATCH * prefill / T(1), of prompts of `prefill` tokens.
"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, Self

import numpy as np

VOCAB = 32000
PREFILL_BATCH = 4
KV_BYTES = 2  # of a number in all engines' KV caches
FIRST_PROMPT = 32  # tokens, for `first_tokens`

Prompts = list[list[int]]
Seconds = Callable[[int, int, int], float]
"""How long an engine takes to generate: sequences, tokens of each prompt, tokens of each answer."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of each prompt before decode steps and in prefill, and the steps over which a difference is taken."""

    decode: int = 32
    prefill: int = 512
    steps: int = 64

    @classmethod
    def of(cls, context: int | None) -> Self:
        """All prompts of `context` tokens, and more steps, since longer prefills vary by more; None: the usual."""
        return cls() if context is None else cls(decode=context, prefill=context, steps=192)

    @property
    def longest(self) -> int:
        """Of any sequence, prompt included, and some more."""
        return max(self.decode, self.prefill) + 2 * self.steps


class Engine(Protocol):
    """One engine with a checkpoint loaded.

    `weight_bytes`: what a decode step reads of it, all layers and the head, as the engine keeps them.
    """

    weight_bytes: int

    def generate(self, prompts: Prompts, max_tokens: int) -> list[list[int]]:
        """The `max_tokens` greedy tokens of each prompt."""
        ...


def cases(batches: Iterable[int], lengths: Lengths) -> dict[str, Callable[[Seconds], float]]:
    """What a case says, measured once: a decode step in ms by batch size ("decode_1", ...), "prefill" in tokens/s."""
    steps = {f"decode_{batch}": partial(_decode_step, batch, lengths) for batch in batches}
    return steps | {"prefill": partial(_prefill, lengths.prefill)}


def _decode_step(batch: int, lengths: Lengths, seconds: Seconds) -> float:
    more, first = (seconds(batch, lengths.decode, tokens) for tokens in (1 + lengths.steps, 1))
    return (more - first) / lengths.steps * 1e3


def _prefill(prompt: int, seconds: Seconds) -> float:
    return PREFILL_BATCH * prompt / seconds(PREFILL_BATCH, prompt, 1)


def token_bytes(model: Path) -> int:
    """Keys and values of a token in all layers, which a decode step reads for each token before it."""
    config = json.loads((model / "config.json").read_text())
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * KV_BYTES


def first_tokens(engine: Engine) -> list[int]:
    """The first greedy token after each of PREFILL_BATCH * 8 fixed prompts: the same model gives mostly the same ones.

    Not all: with random weights the best logits lie close together, and engines round bf16 at different places.
    """
    rng = np.random.default_rng(2)
    prompts = rng.integers(2, VOCAB, (8, PREFILL_BATCH, FIRST_PROMPT)).tolist()
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
