"""DeviceSampler: the sampler's executables and what they keep on the device, for the rows of one step at a time."""

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
from jaxserve.kernels.native import draw as native
from jaxserve.parallel.placement import Placement
from jaxserve.sampling import ops as sampler


@dataclass(frozen=True)
class Sampled:
    """What a step sampled, still on the device."""

    tokens: Array  # i32 [R]
    logprobs: sampler.Logprobs | None = None


class DeviceSampler:
    """Executables by what the rows of a step need: greedy, random, adjusted, full. The first two are one of the native
    kernel's.
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
        """`vocab` counts padding; `top_logprobs` is how many are returned at most.

        `score` gives the log-probabilities of tokens i32[R], and of the most likely ones, under logits f32[R, V].
        """
        self.slots, self.vocab, self.max_len = slots, vocab, max_len
        self._sharding = sharding = placement.sharding()
        self.newest = jax.device_put(jnp.zeros(slots + 1, jnp.int32), sharding)
        self._history = jax.device_put(sampler.empty_history(slots, vocab), sharding)
        self._rows = np.tile(sampler.idle_row(slots, vocab), (slots + 1, 1))  # by slot; the last one stays idle
        self._unbiased_rows: dict[int, tuple[Array, Array]] = {}
        self._owners: list[tuple[Sequence, int] | None] = [None] * slots  # whose row a slot has, and which stay
        self._drawing: set[int] = set()  # slots whose tokens are drawn at random
        self._demanding: set[int] = set()  # slots that may need more than that
        on_one_cpu = placement.platform == "cpu" and len(placement.devices) == 1
        by = sampler.NATIVE if on_one_cpu and uses_native(backend) and native.supported() else sampler.XLA
        top = min(top_logprobs, vocab)

        def program(name: str, function: Callable, **options: Any) -> Program:
            return Program(f"{name} {backend} {top}", jax.jit(function, out_shardings=sharding, **options))

        self._greedy = program("greedy", by.greedy)
        self._random = self._greedy if by.random is by.greedy else program("random", by.random)
        self._adjusted = program("adjusted", by.adjusted, donate_argnums=3)
        full = partial(sampler.sample_full, by=by, top_logprobs=top)
        self._full = program("full", full, donate_argnums=3)
        self.score = program("score", partial(by.logprobs, top=top))
        self._load = program("load", sampler.load_history, donate_argnums=0)

    def sample(self, logits: Array, sequences: list[Sequence | None]) -> Sampled:
        """Dispatches the sampling of logits f32[R, V] for these rows (None: a row that samples nothing). Mutates."""
        present = [s for s in sequences if s is not None]
        self._welcome(present)
        packed, slots = self._pack(sequences, logits.shape[0]), {s.slot for s in present}
        if not slots.isdisjoint(self._demanding):
            with_logprobs = any(map(sampler.wants_logprobs, present))
            if with_logprobs or any(map(sampler.needs_adjusting, present)):
                return self._sample_adjusted(logits, packed, sequences, with_logprobs)
        kind = self._greedy if slots.isdisjoint(self._drawing) else self._random
        tokens, self.newest = kind.at(logits.shape[0])(logits, packed, self.newest)
        return Sampled(tokens)

    def compile(self, logits: jax.ShapeDtypeStruct, tile: int, compiler: Compiler) -> None:
        """Starts to compile everything for logits of this shape; what scores, for a tile's."""
        for program, arguments in self._calls(logits):
            compiler.compile(program, logits.shape[0], *arguments)
        scored = jax.ShapeDtypeStruct((tile, *logits.shape[1:]), logits.dtype, sharding=logits.sharding)
        compiler.compile(self.score, tile, scored, np.zeros(tile, np.int32))
        compiler.compile(self._load, self.max_len, self._history, *self._history_of(self.slots, [], 0))

    def rehearse(self, logits: Array) -> None:
        """Runs everything for logits of this shape, once, on rows that sample nothing. Mutates nothing that counts."""
        for program, arguments in self._calls(logits):
            _, _, *history = program.at(logits.shape[0])(*arguments)
            if history:
                self._history = history[0]
        self._set_history(self.slots, [], 0)

    def close(self) -> None:
        """Frees what the sampler keeps on the device."""
        for array in (self.newest, *self._history, *chain.from_iterable(self._unbiased_rows.values())):
            array.delete()

    def _sample_adjusted(
        self, logits: Array, packed: np.ndarray, sequences: list[Sequence | None], with_logprobs: bool
    ) -> Sampled:
        present, rows = [s for s in sequences if s is not None], logits.shape[0]
        biases = self._biases(sequences, rows) if any(map(sampler.is_biased, present)) else self._unbiased(rows)
        kind = self._full if with_logprobs else self._adjusted
        run = kind.at(rows)
        tokens, self.newest, self._history, *logprobs = run(logits, packed, self.newest, self._history, *biases)
        return Sampled(tokens, *logprobs)

    def _calls(self, logits: Array | jax.ShapeDtypeStruct) -> Iterator[tuple[Program, tuple]]:
        """Programs that sample logits of this shape, with arguments for rows that sample nothing.

        Each has the history of the moment at which it is asked for.
        """
        rows = logits.shape[0]
        least = (logits, self._pack([], rows), self.newest)
        yield from ((kind, least) for kind in dict.fromkeys((self._greedy, self._random)))
        for kind in (self._adjusted, self._full):
            yield kind, (*least, self._history, *self._unbiased(rows))

    def _biases(self, sequences: list[Sequence | None], rows: int) -> tuple[Array, Array]:
        return jax.device_put(sampler.sparse_biases(sequences, rows), self._sharding)

    def _unbiased(self, rows: int) -> tuple[Array, Array]:
        """The sparse biases of so many rows that have none: once on the device."""
        if rows not in self._unbiased_rows:
            self._unbiased_rows[rows] = self._biases([], rows)
        return self._unbiased_rows[rows]

    def _welcome(self, sequences: list[Sequence]) -> None:
        """Notes the parameters and the history of sequences that have (re)entered the batch. Mutates."""
        for sequence in sequences:
            owner = self._owners[sequence.slot]
            if owner is None or owner[0] is not sequence or owner[1] != sequence.preemptions:
                self._owners[sequence.slot] = (sequence, sequence.preemptions)
                self._rows[sequence.slot] = sampler.pack_row(sequence, self.vocab)
                _note(self._drawing, sequence.slot, not sequence.params.greedy)
                _note(self._demanding, sequence.slot, sampler.may_need_more(sequence))
                if sequence.params.penalized:
                    self._set_history(sequence.slot, sequence.tokens, sequence.num_prompt)

    def _pack(self, sequences: list[Sequence | None], rows: int) -> np.ndarray:
        """The parameters of the sampled rows i32[11, R]. After scheduling, a sequence's number of computed tokens is
        the position of the token to be sampled.
        """
        slots = [self.slots if s is None else s.slot for s in sequences]
        packed = self._rows[slots + [self.slots] * (rows - len(slots))].T.copy()
        packed[sampler.POSITION, : len(slots)] = [0 if s is None else s.num_computed for s in sequences]
        return packed

    def _set_history(self, slot: int, tokens: list[int], prompt: int) -> None:
        load = self._load.at(self.max_len)
        self._history = load(self._history, *self._history_of(slot, tokens, prompt))

    def _history_of(self, slot: int, tokens: list[int], prompt: int) -> tuple:
        """The operands of `sampler.load_history`."""
        padded = np.zeros(self.max_len, np.int32)
        padded[: len(tokens)] = tokens
        return np.int32(slot), padded, np.int32(prompt), np.int32(len(tokens))


def _note(members: set[int], member: int, belongs: bool) -> None:
    """Adds a member to a set, or takes it out. Mutates."""
    (members.add if belongs else members.discard)(member)
