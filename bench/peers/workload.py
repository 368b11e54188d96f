"""The measured cases, and how their times become figures.

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
KV_BYTES = 2  # per number in all engines' KV caches
FIRST_PROMPT = 32  # prompt tokens in `first_tokens`

Prompts = list[list[int]]
Seconds = Callable[[int, int, int], float]
"""Measures a generation in seconds, given sequences, tokens of each prompt and tokens of each answer."""


@dataclass(frozen=True)
class CaseLengths:
    """Tokens of each prompt for decode steps and for prefill, and the number of steps that a difference spans."""

    decode: int = 32
    prefill: int = 512
    steps: int = 64

    @classmethod
    def of(cls, context: int | None) -> Self:
        """Return lengths with prompts of `context` tokens, or the default lengths for None.

        With a context there are more steps, because longer prefills vary by more.
        """
        return cls() if context is None else cls(decode=context, prefill=context, steps=192)

    @property
    def max_tokens(self) -> int:
        """An upper bound of the tokens of any sequence, prompt included."""
        return max(self.decode, self.prefill) + 2 * self.steps


class Engine(Protocol):
    """An engine with a loaded checkpoint.

    `weight_bytes` is the size of what a decode step reads, all layers and the head, as the engine stores them.
    """

    weight_bytes: int

    def generate(self, prompts: Prompts, max_tokens: int) -> list[list[int]]:
        """Return `max_tokens` greedy tokens for each prompt."""
        ...


def cases(batches: Iterable[int], lengths: CaseLengths) -> dict[str, Callable[[Seconds], float]]:
    """Return a function per case: "decode_1", ... measures a decode step in ms, "prefill" tokens/s."""
    steps = {f"decode_{batch}": partial(_decode_step, batch, lengths) for batch in batches}
    return steps | {"prefill": partial(_prefill, lengths.prefill)}


def _decode_step(batch: int, lengths: CaseLengths, seconds: Seconds) -> float:
    more, first = (seconds(batch, lengths.decode, tokens) for tokens in (1 + lengths.steps, 1))
    return (more - first) / lengths.steps * 1e3


def _prefill(prompt: int, seconds: Seconds) -> float:
    return PREFILL_BATCH * prompt / seconds(PREFILL_BATCH, prompt, 1)


def token_bytes(model: Path) -> int:
    """Return the bytes of a token's keys and values in all layers, which a decode step reads for each earlier token."""
    config = json.loads((model / "config.json").read_text())
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * KV_BYTES


def first_tokens(engine: Engine) -> list[int]:
    """Return the first greedy token after each of PREFILL_BATCH * 8 fixed prompts.

    Engines that compute the same model give mostly the same tokens. Some tokens differ, because with random weights the
    best logits are close together, and engines round to bf16 at different places.
    """
    rng = np.random.default_rng(2)
    prompts = rng.integers(2, VOCAB, (8, PREFILL_BATCH, FIRST_PROMPT)).tolist()
    return [token for batch in prompts for (token,) in engine.generate(batch, 1)]


def generation(engine: Engine, rng: np.random.Generator, batch: int, length: int, max_tokens: int) -> float:
    """Return the seconds of one generation. Raise RuntimeError if answers do not have `max_tokens` tokens."""
    prompts = rng.integers(2, VOCAB, (batch, length)).tolist()
    start = time.perf_counter()
    answers = engine.generate(prompts, max_tokens)
    seconds = time.perf_counter() - start
    lengths = [len(answer) for answer in answers]
    if lengths != [max_tokens] * batch:
        raise RuntimeError(f"asked for {batch} answers of {max_tokens} tokens, got {lengths}")
    return seconds
