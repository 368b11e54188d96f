"""A feed-forward of experts (mixture of experts): a router sends each token through a few of them."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.core.config import ModelConfig
from jaxserve.kernels import AllReduce, DeferredSwiGLU, LeftOperand, grouped_matmul, matmul, value_of
from jaxserve.models.layers import gate_up_axes, weight


class MoE(nnx.Module):
    """A mixture of X SwiGLU experts whose weights have the layout of `MLP`.

    Tokens are sorted by expert, so that each expert multiplies only its own tokens. The router keeps full precision.
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
        """Return the weights of each token's experts (float32) and the experts, the most likely first."""
        probabilities = jax.nn.softmax(matmul(x, self.router[...], dtype=jnp.float32, backend=self.backend), axis=-1)
        weights, experts = jax.lax.top_k(probabilities, self.experts_per_token)
        if self.normalize:
            weights /= weights.sum(axis=-1, keepdims=True)
        return weights, experts

    def __call__(
        self, x: LeftOperand, residual: Float[Array, "T E"], all_reduce: AllReduce | None = None
    ) -> Float[Array, "T E"]:
        """Return `residual` plus the weighted sum of each token's experts, for x [T, E]."""
        x = value_of(x)
        weights, experts = self.route(x)
        order = jnp.argsort(experts.ravel(), stable=True)
        sizes = jnp.bincount(experts.ravel(), length=len(self.router)).astype(jnp.int32)
        rows = x[order // self.experts_per_token]
        inner = DeferredSwiGLU(grouped_matmul(rows, self.experts_gate_up[...], sizes, backend=self.backend)).value()
        outs = grouped_matmul(inner, self.experts_down[...], sizes, backend=self.backend)[jnp.argsort(order)]
        outs = outs.astype(jnp.float32).reshape(*experts.shape, -1)
        out = jnp.einsum("tne,tn->te", outs, weights)
        return residual + (out if all_reduce is None else all_reduce(out)).astype(x.dtype)
