"""LTS, LRS and MDS of a chain of layers on calibration tokens. Axes: N sequences of S tokens, E hidden, P positions."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.calibration.sensitivity.chain import LayerChain, logits

Positions = Literal["all", "last"]


def cosine(a: Float[Array, "*tokens size"], b: Float[Array, "*tokens size"]) -> Float[Array, "*tokens"]:
    """Of the angle between the vectors of each token, in float32."""
    a, b = (x.astype(jnp.float32) for x in (a, b))
    norms = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return jnp.sum(a * b, axis=-1) / jnp.maximum(norms, jnp.finfo(jnp.float32).tiny)


@dataclass(frozen=True)
class Measures:
    """What is measured with one precision on one batch of tokens, each a mean over positions.

    `positions`: all tokens, or only the last of each sequence.
    """

    chain: LayerChain
    tokens: Int[Array, "N S"]
    precision: str
    positions: Positions = "all"

    def local(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(LTS, LRS) by layer: cos(h_p(x), x) and cos(h_p(x), hQ_p(x)) with x what the full model gives the layer."""
        lts, lrs = [], []
        x = self.chain.embed(self.tokens)
        for number in range(self.chain.config.num_layers):
            out, swapped = self.chain.layer(number, None)(x), self.chain.layer(number, self.precision)(x)
            lts.append(self._similarity(out, x))
            lrs.append(self._similarity(out, swapped))
            x = out
        return tuple(lts), tuple(lrs)

    def degradation(self, swapped: frozenset[int], candidates: Iterable[int]) -> dict[int, float]:
        """MDS: cos(fQ(x), fQ+p(x)) of the logits, for each candidate p beside the swapped layers Q.

        One pass over the layers: each is read once, and a candidate shares everything below it with the others.
        """
        base, streams, wanted = self.chain.embed(self.tokens), {}, frozenset(candidates)
        for number in range(self.chain.config.num_layers):
            layer = self.chain.layer(number, self.precision if number in swapped else None)
            streams = {candidate: layer(x) for candidate, x in streams.items()}
            if number in wanted:
                streams[number] = self.chain.layer(number, self.precision)(base)
            base = layer(base)
        base, graph_and_state = self._at(base), self.chain.head
        return {p: float(_logit_similarity(*graph_and_state, base, self._at(x))) for p, x in streams.items()}

    def _at(self, x: Float[Array, "N S E"]) -> Float[Array, "N P E"]:
        return x if self.positions == "all" else x[:, -1:]

    def _similarity(self, a: Float[Array, "N S E"], b: Float[Array, "N S E"]) -> float:
        return float(cosine(self._at(a), self._at(b)).mean())


@partial(jax.jit, static_argnums=0)
def _logit_similarity(
    graph: nnx.GraphDef, state: nnx.State, a: Float[Array, "N P E"], b: Float[Array, "N P E"]
) -> Float[Array, ""]:
    """Of the logits of one sequence at a time, because a vocabulary is large."""
    return jax.lax.map(lambda pair: cosine(*(logits(graph, state, x) for x in pair)), (a, b)).mean()
