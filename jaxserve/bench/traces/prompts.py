"""Prompts for a trace: random tokens that share prefixes as the trace says."""

from collections.abc import Sequence

import numpy as np

from jaxserve.bench.traces.trace import Trace
from jaxserve.bench.vocabulary import Vocabulary
from jaxserve.bench.workload import Sample
from jaxserve.core.numeric import ceil_div

SEEDS = 2**63


def trace_samples(
    trace: Trace, vocabulary: Vocabulary, rng: np.random.Generator, *, as_text: bool = False
) -> list[Sample]:
    """Return one sample for each request, in the trace's order; lengths of 0 tokens become 1.

    A hash id always stands for the same block, drawn with its own seed. A prompt that ends within a block has the
    beginning of that block. Prompts with the same first ids therefore share that prefix, token by token. For text, the
    number of tokens is that of the whole prompt, and the last block is adjusted to reach it.
    """
    blocks = _Blocks(vocabulary, trace.block_tokens, int(rng.integers(SEEDS)))
    samples = []
    for i, (length, output) in enumerate(zip(trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True)):
        ids = () if trace.hash_ids is None else trace.hash_ids[i]
        make = blocks.text if as_text else blocks.tokens
        prompt, count = make(ids, max(length, 1), rng)
        samples.append(Sample(prompt, count, max(output, 1)))
    return samples


class _Blocks:
    """The blocks of a trace's prompts, each of which is made at its first use and then reused."""

    def __init__(self, vocabulary: Vocabulary, size: int, seed: int):
        self._vocabulary, self._size, self._seed = vocabulary, size, seed
        self._tokens: dict[int, tuple[int, ...]] = {}
        self._texts: dict[int, str] = {}

    def tokens(self, hash_ids: Sequence[int], length: int, rng: np.random.Generator) -> tuple[tuple[int, ...], int]:
        """Return a prompt of `length` tokens, cut from its blocks; `rng` draws tokens that no block covers."""
        needed = hash_ids[: ceil_div(length, self._size)]
        prompt = tuple(token for id in needed for token in self._block(id))[:length]
        return prompt + self._vocabulary.random_ids(rng, length - len(prompt)), length

    def text(self, hash_ids: Sequence[int], length: int, rng: np.random.Generator) -> tuple[str, int]:
        """Return a prompt of about `length` tokens as text, and its number of tokens."""
        # At least one token of the last block remains to be adjusted.
        full = (length - 1) // self._size
        head = "".join(self._text(id) for id in hash_ids[:full])
        rest = self._generator(hash_ids[full]) if full < len(hash_ids) else rng
        known = self._vocabulary.num_special + full * self._size if full <= len(hash_ids) else None
        return self._vocabulary.text_of_length(rest, length, head=head, head_tokens=known)

    def _block(self, id: int) -> tuple[int, ...]:
        if id not in self._tokens:
            self._tokens[id] = self._vocabulary.random_ids(self._generator(id), self._size)
        return self._tokens[id]

    def _text(self, id: int) -> str:
        if id not in self._texts:
            self._texts[id] = self._vocabulary.continuation(self._generator(id), self._size)
        return self._texts[id]

    def _generator(self, id: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, id])
