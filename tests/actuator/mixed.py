"""The dummy model over whole sequences, each position in the precisions that were in force when it was computed."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.checkpoint import open_checkpoint
from jaxserve.kernels import Rotated
from jaxserve.models import rope_cos_sin
from jaxserve.models.dense import dense_causal_attend, restore_block
from tests.actuator.adapted import RequestRun
from tests.support.reference import turned

LENGTH = 256  # every sequence is padded to this, so that one compilation serves all


class MixedReference:
    """Every layer in every precision, of which a mask over positions selects one.

    A position's query, key, value and feed-forward have its own precision, and it attends to keys and values as they
    were written. That is what a change of precision between two steps means when the cache is kept.
    """

    def __init__(self, model: Path, precisions: Sequence[str]):
        checkpoint = open_checkpoint(model, "dummy")
        self.config, self.precisions = checkpoint.config, tuple(precisions)
        self._layers = [
            [
                restore_block(self.config, name, checkpoint.variant(name, precision, self.config), precision)
                for precision in precisions
            ]
            for name in self.config.block_ids[1:-1]
        ]
        self._embed, self._head = (
            restore_block(self.config, name, checkpoint.variant(name, self.config.dtype, self.config))
            for name in ("embed", "head")
        )
        self._logits = jax.jit(self._forward)

    def logits(self, tokens: Sequence[int], in_force: Sequence[Mapping[str, str]]) -> np.ndarray:
        """Return the logits (float32[len(tokens), V]), with each position's precisions by block in `in_force`."""
        padded = np.zeros(LENGTH, np.int32)
        padded[: len(tokens)] = tokens
        chosen = np.zeros((len(self._layers), LENGTH), np.int32)
        for position, precisions in enumerate(in_force):
            for layer in range(len(self._layers)):
                chosen[layer, position] = self.precisions.index(precisions[f"layers.{layer}"])
        return np.asarray(self._logits(jnp.asarray(padded), jnp.asarray(chosen)))[: len(tokens)]

    def check(self, runs: Sequence[RequestRun], p: Sequence[int], tokens: Sequence[int]) -> None:
        """Check that every token after a prompt is the likeliest in the precisions that were in force at its step."""
        whole = (*p, *tokens)
        ends = [*(run.known for run in runs[1:]), len(whole)]
        for run, end in zip(runs, ends, strict=True):
            logits = self.logits(whole[: end - 1], run.in_force[: end - 1])[run.known - 1 :]
            chosen = logits[np.arange(end - run.known), list(whole[run.known : end])]
            np.testing.assert_allclose(chosen, logits.max(-1), atol=2e-4)

    def _forward(self, tokens: jax.Array, chosen: jax.Array) -> jax.Array:
        positions = jnp.arange(LENGTH, dtype=jnp.int32)
        cos, sin = rope_cos_sin(self.config, positions)
        attend = dense_causal_attend(positions, scale=self.config.head_dim**-0.5)
        x = self._embed(tokens)
        for layer, variants in enumerate(self._layers):
            parts: list[tuple[jax.Array, ...]] = []

            def note(qkv: Rotated, parts: list = parts) -> jax.Array:
                parts.append(qkv.value())
                return jnp.zeros_like(parts[-1][0])

            for variant in variants:
                variant(x, cos, sin, note)
            q, k, v = (self._choose(chosen[layer], [part[i] for part in parts]) for i in range(3))
            out = attend(turned(q, k, v))
            x = self._choose(chosen[layer], [variant(x, cos, sin, lambda *_, out=out: out) for variant in variants])
        return self._head(x)

    @staticmethod
    def _choose(chosen: jax.Array, candidates: Sequence[jax.Array]) -> jax.Array:
        shape = (-1, *(1,) * (candidates[0].ndim - 1))
        result = candidates[0]
        for index, candidate in enumerate(candidates[1:], start=1):
            result = jnp.where((chosen == index).reshape(shape), candidate, result)
        return result
