"""SamplerPrograms: the executables that sample the tokens of steps, which belong to a placement."""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.compilation.programs import Program, StartsCompiling, untraced
from jaxserve.core.config import KernelBackend
from jaxserve.kernels.backend import uses_native
from jaxserve.kernels.native import sampling as native
from jaxserve.parallel.placement import Placement
from jaxserve.sampling import ops as sampler

# The newest tokens i32[slots + 1], and the history of each slot.
State = tuple[Any, sampler.History]


class SamplerPrograms:
    """The programs of a sampler for a number of slots, from the cheapest on.

    They are greedy, random, masked (random with top_k and top_p), adjusted (penalties and biases) and full (with
    log-probabilities). One program serves for all that an implementation does not tell apart. `score` returns the
    log-probabilities of tokens i32[R], and of the most likely ones, under logits f32[R, V]. `score_rows` does so for
    tokens that were sampled.
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
        """Make programs for `slots` sequences of at most `max_len` tokens.

        `vocab` includes padding. At most `top_logprobs` log-probabilities of most likely tokens are returned per row.
        """
        self.slots, self.vocab, self.max_len = slots, vocab, max_len
        self.sharding = sharding = placement.sharding()
        on_cpu = placement.platform == "cpu"
        has_native = on_cpu and len(placement.devices) == 1 and uses_native(backend) and native.supported()
        implementation = sampler.NATIVE if has_native else sampler.XLA_ON_CPU if on_cpu else sampler.XLA
        top = min(top_logprobs, vocab)

        def program(name: str, function: Callable, **options: Any) -> Program:
            jitted = jax.jit(untraced(function), out_shardings=sharding, **options)
            return Program(f"{name} {backend} {top}", jitted, placement.mesh)

        self.greedy = program("greedy", implementation.greedy)
        same = implementation.random is implementation.greedy
        self.random = self.greedy if same else program("random", implementation.random)
        same = implementation.masked is implementation.random
        self.masked = self.random if same else program("masked", implementation.masked)
        self.adjusted = program("adjusted", implementation.adjusted, donate_argnums=3)
        full = partial(sampler.sample_full, implementation=implementation, top_logprobs=top)
        self.full = program("full", full, donate_argnums=3)
        self.score = program("score", partial(implementation.logprobs, top=top))
        self.score_rows = program("score rows", partial(sampler.logprobs_of_sampled, implementation, top=top))
        self.mask = program("mask", sampler.mask_logits)
        self.load = program("load", sampler.load_history, donate_argnums=0)
        self._start = program(f"sampler state {slots} {vocab} {placement.mesh.size}", self._empty_state)

    def start(self) -> State:
        """Return the state at the start, in new arrays."""
        return self._start.at(0)()

    @property
    def newest(self) -> jax.ShapeDtypeStruct:
        """The abstract array of the newest tokens."""
        return jax.ShapeDtypeStruct((self.slots + 1,), np.int32, sharding=self.sharding)

    def compile_start(self, compiler: StartsCompiling) -> None:
        """Start to compile the program that makes the state."""
        compiler.compile(self._start, 0)

    def compile(self, logits: jax.ShapeDtypeStruct, tile: int, compiler: StartsCompiling) -> None:
        """Start to compile all programs for logits of this shape, and `score` for those of a tile."""
        rows, history = logits.shape[0], self._history
        packed = np.zeros((sampler.NUM_FIELDS, rows), np.int32)
        biases = jax.tree.map(self._outline, sampler.sparse_biases([], rows))
        for program, arguments in self.calls(logits, packed, lambda: (self.newest, history), biases):
            compiler.compile(program, rows, *arguments)
        scored = jax.ShapeDtypeStruct((tile, *logits.shape[1:]), logits.dtype, sharding=logits.sharding)
        compiler.compile(self.score, tile, scored, np.zeros(tile, np.int32))
        compiler.compile(self.load, self.max_len, history, *self.history_of(self.slots, [], 0))
        self.compile_start(compiler)

    def calls(
        self, logits: Any, packed: np.ndarray, state: Callable[[], State], unbiased: tuple
    ) -> Iterator[tuple[Program, tuple]]:
        """Yield the programs that sample logits of this shape, with arguments for rows that sample nothing.

        `state` is called at each iteration, because programs donate the history.
        """
        for kind in dict.fromkeys((self.greedy, self.random, self.masked)):
            yield kind, (logits, packed, state()[0])
        for kind in (self.adjusted, self.full):
            yield kind, (logits, packed, *state(), *unbiased)
        yield self.mask, (logits, *sampler.grammar_masks([], logits.shape))
        yield self.score_rows, (logits, np.zeros(len(packed[0]), np.int32))

    def history_of(self, slot: int, tokens: list[int], prompt: int) -> tuple:
        """Return the operands of `sampler.load_history` after the history."""
        padded = np.zeros(self.max_len, np.int32)
        padded[: len(tokens)] = tokens
        return np.int32(slot), padded, np.int32(prompt), np.int32(len(tokens))

    def _empty_state(self) -> tuple[Array, sampler.History]:
        return jnp.zeros(self.slots + 1, jnp.int32), sampler.empty_history(self.slots, self.vocab)

    @cached_property
    def _history(self) -> sampler.History:
        return jax.tree.map(self._outline, jax.eval_shape(self._empty_state)[1])

    def _outline(self, array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self.sharding)
