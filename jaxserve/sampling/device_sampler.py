"""DeviceSampler: samples a step's tokens, with the sampling state of each sequence on the device."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import jax
import numpy as np
from jax import Array

from jaxserve.compilation.programs import Program
from jaxserve.core.request import Sequence
from jaxserve.sampling import ops as sampler
from jaxserve.sampling.programs import SamplerPrograms


@dataclass(frozen=True)
class Sampled:
    """The tokens that a step sampled, still on the device."""

    tokens: Array  # i32 [R]
    logprobs: sampler.Logprobs | None = None


class DeviceSampler:
    """Sampling of the rows of one step at a time, by the cheapest of the programs that the rows allow."""

    def __init__(self, programs: SamplerPrograms):
        """Allocate the state for as many sequences as the programs have slots."""
        self.programs = programs
        self.slots, self.vocab, self.max_len = programs.slots, programs.vocab, programs.max_len
        self.newest, self._history = programs.start()
        # By slot; the last one stays idle.
        self._rows = np.tile(sampler.idle_row(self.slots, self.vocab), (self.slots + 1, 1))
        self._unbiased_rows: dict[int, tuple[Array, Array]] = {}
        # The sequence whose parameters a slot has, and how often it had been given a slot when they were set.
        self._owners: list[tuple[Sequence, int] | None] = [None] * self.slots
        self._random_slots: set[int] = set()  # the others are greedy
        self._masked_slots: set[int] = set()  # random ones with top_k or top_p
        self._slots_to_adjust: set[int] = set()  # their rows may need the adjusted or the full executable

    def sample(self, logits: Array, sequences: list[Sequence | None]) -> Sampled:
        """Dispatch the sampling of logits f32[R, V] for these rows; a row of None samples nothing."""
        present = [s for s in sequences if s is not None]
        self._update_slots(present)
        packed, slots = self._pack(sequences, logits.shape[0]), {s.slot for s in present}
        raw = logits
        if any(s.matcher is not None for s in present):
            logits = self.programs.mask.at(logits.shape[0])(logits, *sampler.grammar_masks(sequences, logits.shape))
        if not slots.isdisjoint(self._slots_to_adjust):
            with_logprobs = any(map(sampler.wants_logprobs, present))
            if with_logprobs or any(map(sampler.needs_adjusting, present)):
                return self._sample_adjusted(logits, raw, packed, sequences, with_logprobs)
        kind = self._cheapest(slots)
        tokens, self.newest = kind.at(logits.shape[0])(logits, packed, self.newest)
        return Sampled(tokens)

    def _cheapest(self, slots: set[int]) -> Program:
        """Return the cheapest program that draws the tokens of these slots without penalties and biases."""
        if slots.isdisjoint(self._random_slots):
            return self.programs.greedy
        return self.programs.random if slots.isdisjoint(self._masked_slots) else self.programs.masked

    def run_on_padding(self, logits: Array) -> None:
        """Run all executables for logits of this shape once, on rows that sample nothing."""
        for program, arguments in self._calls(logits):
            results = program.at(logits.shape[0])(*arguments)
            if program in (self.programs.adjusted, self.programs.full):
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
        kind = self.programs.full if with_logprobs and raw is logits else self.programs.adjusted
        run = kind.at(rows)
        tokens, self.newest, self._history, *logprobs = run(logits, packed, self.newest, self._history, *biases)
        if with_logprobs and raw is not logits:
            return Sampled(tokens, self.programs.score_rows.at(rows)(raw, tokens))
        return Sampled(tokens, *logprobs)

    def _calls(self, logits: Array) -> Iterator[tuple[Program, tuple]]:
        """Yield the programs that sample logits of this shape, with arguments for rows that sample nothing."""
        rows = logits.shape[0]
        state = lambda: (self.newest, self._history)  # noqa: E731
        return self.programs.calls(logits, self._pack([], rows), state, self._unbiased(rows))

    def _biases(self, sequences: list[Sequence | None], rows: int) -> tuple[Array, Array]:
        return jax.device_put(sampler.sparse_biases(sequences, rows), self.programs.sharding)

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
                _set_membership(self._masked_slots, sequence.slot, sampler.needs_masks(sequence, self.vocab))
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
        load = self.programs.load.at(self.max_len)
        self._history = load(self._history, *self.programs.history_of(slot, tokens, prompt))


def _set_membership(members: set[int], member: int, belongs: bool) -> None:
    (members.add if belongs else members.discard)(member)
