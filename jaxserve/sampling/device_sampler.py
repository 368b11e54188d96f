"""DeviceSampler: the executables that sample a step's tokens, and their state on the device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.compilation.programs import Compiler, Program
from jaxserve.core.config import KernelBackend
from jaxserve.core.request import Sequence
from jaxserve.kernels.backend import uses_native
from jaxserve.kernels.native import sampling as native
from jaxserve.parallel.placement import Placement
from jaxserve.sampling import ops as sampler


@dataclass(frozen=True)
class Sampled:
    """The tokens that a step sampled, still on the device."""

    tokens: Array  # i32 [R]
    logprobs: sampler.Logprobs | None = None


class DeviceSampler:
    """Sampling of the rows of one step at a time, by the cheapest executable that the rows allow.

    The executables are greedy, random, adjusted (penalties and biases) and full (with log-probabilities). The native
    kernel has one executable for greedy and random.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        slots: int,
        vocab: int,
        max_len: int,
        top_logprobs: int,
        backend: KernelBackend = "auto",
    ):
        """Allocate the sampler's state for `slots` sequences of at most `max_len` tokens.

        `vocab` includes padding. At most `top_logprobs` log-probabilities of most likely tokens are returned per row.
        The program `score` returns the log-probabilities of tokens i32[R], and of the most likely ones, under logits
        f32[R, V].
        """
        self.slots, self.vocab, self.max_len = slots, vocab, max_len
        self._sharding = sharding = placement.sharding()
        self.newest = jax.device_put(jnp.zeros(slots + 1, jnp.int32), sharding)
        self._history = jax.device_put(sampler.empty_history(slots, vocab), sharding)
        self._rows = np.tile(sampler.idle_row(slots, vocab), (slots + 1, 1))  # by slot; the last one stays idle
        self._unbiased_rows: dict[int, tuple[Array, Array]] = {}
        # The sequence whose parameters a slot has, and how often it had been given a slot when they were set.
        self._owners: list[tuple[Sequence, int] | None] = [None] * slots
        self._random_slots: set[int] = set()  # the others are greedy
        self._slots_to_adjust: set[int] = set()  # their rows may need the adjusted or the full executable
        on_one_cpu = placement.platform == "cpu" and len(placement.devices) == 1
        has_native = on_one_cpu and uses_native(backend) and native.supported()
        implementation = sampler.NATIVE if has_native else sampler.XLA
        top = min(top_logprobs, vocab)

        def program(name: str, function: Callable, **options: Any) -> Program:
            return Program(f"{name} {backend} {top}", jax.jit(function, out_shardings=sharding, **options))

        self._greedy = program("greedy", implementation.greedy)
        same = implementation.random is implementation.greedy
        self._random = self._greedy if same else program("random", implementation.random)
        self._adjusted = program("adjusted", implementation.adjusted, donate_argnums=3)
        full = partial(sampler.sample_full, implementation=implementation, top_logprobs=top)
        self._full = program("full", full, donate_argnums=3)
        self.score = program("score", partial(implementation.logprobs, top=top))
        self._score_rows = program("score rows", partial(sampler.logprobs_of_sampled, implementation, top=top))
        self._mask = program("mask", sampler.mask_logits)
        self._load = program("load", sampler.load_history, donate_argnums=0)

    def sample(self, logits: Array, sequences: list[Sequence | None]) -> Sampled:
        """Dispatch the sampling of logits f32[R, V] for these rows; a row of None samples nothing."""
        present = [s for s in sequences if s is not None]
        self._update_slots(present)
        packed, slots = self._pack(sequences, logits.shape[0]), {s.slot for s in present}
        raw = logits
        if any(s.matcher is not None for s in present):
            logits = self._mask.at(logits.shape[0])(logits, *sampler.grammar_masks(sequences, logits.shape))
        if not slots.isdisjoint(self._slots_to_adjust):
            with_logprobs = any(map(sampler.wants_logprobs, present))
            if with_logprobs or any(map(sampler.needs_adjusting, present)):
                return self._sample_adjusted(logits, raw, packed, sequences, with_logprobs)
        kind = self._greedy if slots.isdisjoint(self._random_slots) else self._random
        tokens, self.newest = kind.at(logits.shape[0])(logits, packed, self.newest)
        return Sampled(tokens)

    def compile(self, logits: jax.ShapeDtypeStruct, tile: int, compiler: Compiler) -> None:
        """Start to compile all executables for logits of this shape, and `score` for those of a tile."""
        for program, arguments in self._calls(logits):
            compiler.compile(program, logits.shape[0], *arguments)
        scored = jax.ShapeDtypeStruct((tile, *logits.shape[1:]), logits.dtype, sharding=logits.sharding)
        compiler.compile(self.score, tile, scored, np.zeros(tile, np.int32))
        compiler.compile(self._load, self.max_len, self._history, *self._history_of(self.slots, [], 0))

    def run_on_padding(self, logits: Array) -> None:
        """Run all executables for logits of this shape once, on rows that sample nothing."""
        for program, arguments in self._calls(logits):
            results = program.at(logits.shape[0])(*arguments)
            if program in (self._adjusted, self._full):
                self._history = results[2]
        self._set_history(self.slots, [], 0)

    def close(self) -> None:
        """Free the sampler's state on the device."""
        for array in (self.newest, *self._history, *chain.from_iterable(self._unbiased_rows.values())):
            array.delete()

    def _sample_adjusted(
        self, logits: Array, raw: Array, packed: np.ndarray, sequences: list[Sequence | None], with_logprobs: bool
    ) -> Sampled:
        """Dispatch the sampling of logits with penalties and biases. Log-probabilities are those of the `raw` ones."""
        present, rows = [s for s in sequences if s is not None], logits.shape[0]
        biases = self._biases(sequences, rows) if any(map(sampler.is_biased, present)) else self._unbiased(rows)
        kind = self._full if with_logprobs and raw is logits else self._adjusted
        run = kind.at(rows)
        tokens, self.newest, self._history, *logprobs = run(logits, packed, self.newest, self._history, *biases)
        if with_logprobs and raw is not logits:
            return Sampled(tokens, self._score_rows.at(rows)(raw, tokens))
        return Sampled(tokens, *logprobs)

    def _calls(self, logits: Array | jax.ShapeDtypeStruct) -> Iterator[tuple[Program, tuple]]:
        """Yield the programs that sample logits of this shape, with arguments for rows that sample nothing.

        The arguments hold the history at the time of each iteration, because programs donate it.
        """
        rows = logits.shape[0]
        common = (logits, self._pack([], rows), self.newest)
        yield from ((kind, common) for kind in dict.fromkeys((self._greedy, self._random)))
        for kind in (self._adjusted, self._full):
            yield kind, (*common, self._history, *self._unbiased(rows))
        yield self._mask, (logits, *sampler.grammar_masks([], logits.shape))
        yield self._score_rows, (logits, np.zeros(rows, np.int32))

    def _biases(self, sequences: list[Sequence | None], rows: int) -> tuple[Array, Array]:
        return jax.device_put(sampler.sparse_biases(sequences, rows), self._sharding)

    def _unbiased(self, rows: int) -> tuple[Array, Array]:
        """Return empty sparse biases for this number of rows, from the device's memory after the first call."""
        if rows not in self._unbiased_rows:
            self._unbiased_rows[rows] = self._biases([], rows)
        return self._unbiased_rows[rows]

    def _update_slots(self, sequences: list[Sequence]) -> None:
        """Store the parameters and the history of sequences that have entered the batch or returned to it."""
        for sequence in sequences:
            owner = self._owners[sequence.slot]
            if owner is None or owner[0] is not sequence or owner[1] != sequence.starts:
                self._owners[sequence.slot] = (sequence, sequence.starts)
                self._rows[sequence.slot] = sampler.pack_row(sequence, self.vocab)
                _set_membership(self._random_slots, sequence.slot, not sequence.params.greedy)
                _set_membership(self._slots_to_adjust, sequence.slot, sampler.may_need_adjusting(sequence))
                if sequence.params.penalized:
                    self._set_history(sequence.slot, sequence.tokens, sequence.num_prompt)

    def _pack(self, sequences: list[Sequence | None], rows: int) -> np.ndarray:
        """Return the parameters i32[11, R] of the sampled rows.

        After scheduling, a sequence's number of computed tokens is the position of the token to be sampled.
        """
        slots = [self.slots if s is None else s.slot for s in sequences]
        packed = self._rows[slots + [self.slots] * (rows - len(slots))].T.copy()
        packed[sampler.POSITION, : len(slots)] = [0 if s is None else s.num_computed for s in sequences]
        return packed

    def _set_history(self, slot: int, tokens: list[int], prompt: int) -> None:
        load = self._load.at(self.max_len)
        self._history = load(self._history, *self._history_of(slot, tokens, prompt))

    def _history_of(self, slot: int, tokens: list[int], prompt: int) -> tuple:
        """Return the operands of `sampler.load_history` after the history."""
        padded = np.zeros(self.max_len, np.int32)
        padded[: len(tokens)] = tokens
        return np.int32(slot), padded, np.int32(prompt), np.int32(len(tokens))


def _set_membership(members: set[int], member: int, belongs: bool) -> None:
    (members.add if belongs else members.discard)(member)
