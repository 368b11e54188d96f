"""DeviceSampler: the sampler's executables and what they keep on the device, for the rows of one step at a time."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.core.request import Sequence
from jaxserve.executor import sampler
from jaxserve.parallel.placement import Placement


@dataclass(frozen=True)
class Sampled:
    """What a step sampled, still on the device."""

    tokens: Array  # i32 [R]
    logprobs: sampler.Logprobs | None = None


class DeviceSampler:
    """Three executables by what the rows of a step need: greedy, random, full."""

    def __init__(self, placement: Placement, *, slots: int, vocab: int, max_len: int, top_logprobs: int):
        """`vocab` counts padding; `top_logprobs` is how many are returned at most."""
        self.slots, self.vocab, self.max_len, self.top_logprobs = slots, vocab, max_len, top_logprobs
        sharding = placement.sharding()
        self.newest = jax.device_put(jnp.zeros(slots + 1, jnp.int32), sharding)
        self._history = jax.device_put(sampler.empty_history(slots, vocab), sharding)
        self._loaded: dict[int, tuple] = {}  # slot -> whose history it holds
        jit = partial(jax.jit, out_shardings=sharding)
        self._greedy = jit(sampler.sample_greedy)
        self._random = jit(sampler.sample_random)
        self._full = jit(partial(sampler.sample_full, top_logprobs=min(top_logprobs, vocab)), donate_argnums=3)
        self._load = jit(sampler.load_history, donate_argnums=0)

    @staticmethod
    def bytes_needed(slots: int, vocab: int) -> int:
        """Bytes that the sampler keeps on the device."""
        return (slots + 1) * (4 + 5 * vocab)

    def sample(self, logits: Array, sequences: list[Sequence | None]) -> Sampled:
        """Dispatches the sampling of logits f32[R, V] for these rows (None: a row that samples nothing). Mutates."""
        rows = logits.shape[0]
        packed = sampler.pack_rows(sequences, rows, self.slots, self.vocab)
        present = [s for s in sequences if s is not None]
        if any(sampler.needs_full(s) for s in present):
            self._load_histories(present)
            ids, biases = sampler.sparse_biases(sequences, rows)
            tokens, self.newest, self._history, logprobs = self._full(
                logits, packed, self.newest, self._history, ids, biases
            )
            return Sampled(tokens, logprobs)
        kind = self._greedy if all(s.params.greedy for s in present) else self._random
        tokens, self.newest = kind(logits, packed, self.newest)
        return Sampled(tokens)

    def warm(self, logits: Array) -> None:
        """Compiles all executables for this shape of logits."""
        rows = logits.shape[0]
        packed = sampler.pack_rows([], rows, self.slots, self.vocab)
        self._greedy(logits, packed, self.newest)
        self._random(logits, packed, self.newest)
        ids, biases = sampler.sparse_biases([], rows)
        _, _, self._history, _ = self._full(logits, packed, self.newest, self._history, ids, biases)
        self._set_history(self.slots, [], 0)

    def close(self) -> None:
        """Frees what the sampler keeps on the device."""
        for array in (self.newest, *self._history):
            array.delete()

    def _load_histories(self, sequences: list[Sequence]) -> None:
        """Brings the slots of penalised sequences up to date when such a sequence has (re)entered the batch."""
        for sequence in sequences:
            owner = (sequence.id, sequence.preemptions)
            if sequence.params.penalized and self._loaded.get(sequence.slot) != owner:
                self._loaded[sequence.slot] = owner
                self._set_history(sequence.slot, sequence.tokens, sequence.num_prompt)

    def _set_history(self, slot: int, tokens: list[int], prompt: int) -> None:
        padded = np.zeros(self.max_len, np.int32)
        padded[: len(tokens)] = tokens
        self._history = self._load(self._history, np.int32(slot), padded, np.int32(prompt), np.int32(len(tokens)))
