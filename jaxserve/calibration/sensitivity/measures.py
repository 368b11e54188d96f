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
    """Return the cosine similarity of the vectors of each token, computed in float32."""
    a, b = (x.astype(jnp.float32) for x in (a, b))
    norms = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return jnp.sum(a * b, axis=-1) / jnp.maximum(norms, jnp.finfo(jnp.float32).tiny)


@dataclass(frozen=True)
class Measures:
    """The sensitivity measures of one precision on one batch of tokens, each a mean over positions."""

    chain: LayerChain
    tokens: Int[Array, "N S"]
    precision: str
    positions: Positions = "all"  # all tokens, or only the last one of each sequence

    def local(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return LTS and LRS by layer p: cos(h_p(x), x) and cos(h_p(x), hQ_p(x)).

        x is the input of layer p in the model in full precision.
        """
        lts, lrs = [], []
        x = self.chain.embed(self.tokens)
        for index in range(self.chain.config.num_layers):
            out, swapped = self.chain.layer(index, None)(x), self.chain.layer(index, self.precision)(x)
            lts.append(self._similarity(out, x))
            lrs.append(self._similarity(out, swapped))
            x = out
        return tuple(lts), tuple(lrs)

    def degradation(self, swapped: frozenset[int], candidates: Iterable[int]) -> dict[int, float]:
        """Return the MDS of each candidate p, given the swapped layers Q: cos(fQ(x), fQ+p(x)) of the logits.

        One pass over the layers reads each layer once. All candidates share the layers below them.
        """
        base, streams, wanted = self.chain.embed(self.tokens), {}, frozenset(candidates)
        for index in range(self.chain.config.num_layers):
            layer = self.chain.layer(index, self.precision if index in swapped else None)
            streams = {candidate: layer(x) for candidate, x in streams.items()}
            if index in wanted:
                streams[index] = self.chain.layer(index, self.precision)(base)
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
    """Return the mean cosine similarity of the logits, one sequence at a time because a vocabulary is large."""
    return jax.lax.map(lambda pair: cosine(*(logits(graph, state, x) for x in pair)), (a, b)).mean()
