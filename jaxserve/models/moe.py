"""Mixture of experts: each token runs through the few feed-forwards that a router picks for it."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.core.config import ModelConfig
from jaxserve.kernels import Gated, Rows, Total, grouped_matmul, matmul, value_of
from jaxserve.models.layers import gate_up_axes, weight


class MoE(nnx.Module):
    """X SwiGLU experts with weights as in `MLP`; tokens are grouped by expert, so that each costs its own.

    The router keeps full precision.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, bits: int | None = None):
        assert config.moe is not None
        self.experts_per_token = config.moe.experts_per_token
        self.backend = config.kernel_backend
        self.normalize = config.moe.normalize_weights
        experts, hidden = ("experts", config.moe.num_experts), ("embed", config.hidden_size)
        inner = config.moe.intermediate_size
        self.router = weight(config, rngs, experts, hidden)
        parts = gate_up_axes(config, inner)
        self.experts_gate_up = weight(config, rngs, experts, *parts, hidden, bits=bits)
        self.experts_down = weight(config, rngs, experts, hidden, ("mlp", inner), bits=bits, parts=config.shards)

    def route(self, x: Float[Array, "T E"]) -> tuple[Float[Array, "T top"], Int[Array, "T top"]]:
        """Each token's experts, the most likely first, and the weights of their outputs in float32."""
        probabilities = jax.nn.softmax(matmul(x, self.router[...], dtype=jnp.float32, backend=self.backend), axis=-1)
        weights, experts = jax.lax.top_k(probabilities, self.experts_per_token)
        if self.normalize:
            weights /= weights.sum(axis=-1, keepdims=True)
        return weights, experts

    def __call__(self, x: Rows, residual: Float[Array, "T E"], total: Total | None = None) -> Float[Array, "T E"]:
        x = value_of(x)
        weights, experts = self.route(x)
        order = jnp.argsort(experts.ravel(), stable=True)
        sizes = jnp.bincount(experts.ravel(), length=len(self.router)).astype(jnp.int32)
        rows = x[order // self.experts_per_token]
        inner = Gated(grouped_matmul(rows, self.experts_gate_up[...], sizes, backend=self.backend)).value()
        outs = grouped_matmul(inner, self.experts_down[...], sizes, backend=self.backend)[jnp.argsort(order)]
        outs = outs.astype(jnp.float32).reshape(*experts.shape, -1)
        out = jnp.einsum("tne,tn->te", outs, weights)
        return residual + (out if total is None else total(out)).astype(x.dtype)
