"""Layers shared by every family: norm, attention, feed-forward, and the three kinds of block built of them.

Axes: T tokens, R rows, E hidden, K kv heads, G query heads per kv head, D head_dim, I intermediate, V vocabulary.
Parameters are stored [outputs..., inputs...] and name their logical axes in their metadata `axes`; the axis that tensor
parallelism splits comes first among the outputs or first among the inputs. Activations have the dtype of the
parameters; norms and rotations are computed in float32.

The large matrices of a layer may be quantised: with `bits` given, their parameter is a QArray, whose leaves have the
axes of the outputs and then the first axis of the inputs. So may the head's and the embedding's. Biases and norms keep
full precision.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.core.config import ModelConfig
from jaxserve.kernels import Gated, HeadNorms, Normed, Rotated, Rows, Total, matmul
from jaxserve.models.quantized import random_qarray
from jaxserve.quantization import QArray

Attend = Callable[[Rotated], Float[Array, "T K G D"]]
"""Queries, keys and values -> outputs: how the tokens attend to each other is the caller's."""

INIT_STDDEV = 0.02

Axis = tuple[str | None, int]
"""Logical name and size."""


def weight(
    config: ModelConfig, rngs: nnx.Rngs, *axes: Axis, bits: int | None = None, inputs: int = 1, parts: int = 1
) -> nnx.Param:
    """A random parameter; `axes` are its axes in order, the last `inputs` of them contracted.

    `bits`: as a QArray. `parts`: into how many shares tensor parallelism cuts the inputs.
    """
    names, shape = zip(*axes, strict=True)
    if bits is None:
        value = jax.random.normal(rngs.params(), shape, jnp.float32) * INIT_STDDEV
        return nnx.Param(value.astype(config.dtype), axes=names)
    out, size = shape[:-inputs], math.prod(shape[-inputs:])
    value = random_qarray(rngs.params(), out, size, bits, parts, INIT_STDDEV)
    return nnx.Param(value, axes=names[: len(out) + 1])


def bias(config: ModelConfig, *axes: Axis) -> nnx.Param:
    """A zero parameter; `axes` as for `weight`."""
    names, shape = zip(*axes, strict=True)
    return nnx.Param(jnp.zeros(shape, config.dtype), axes=names)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis, then a learned scale [size]."""

    def __init__(self, config: ModelConfig, size: int, axis: str | None):
        self.eps = config.rms_norm_eps
        self.weight = nnx.Param(jnp.ones((size,), config.dtype), axes=(axis,))

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        return self.before_product(x).value()

    def before_product(self, x: Float[Array, "*rows size"]) -> Normed:
        """The same, to be computed by the product that takes it."""
        return Normed(x, self.weight[...], self.eps)


class Attention(nnx.Module):
    """Grouped-query attention around an injected `Attend`.

    `qkv` [K, G + 2, D, E] holds, for each kv head, its G query heads, then its key and its value projection, so that
    one axis splits all of attention.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, bits: int | None = None):
        self.backend = config.kernel_backend
        heads, group = ("kv_heads", config.num_kv_heads), config.num_heads // config.num_kv_heads
        head, hidden = (None, config.head_dim), ("embed", config.hidden_size)
        self.qkv = weight(config, rngs, heads, (None, group + 2), head, hidden, bits=bits)
        self.qkv_bias = bias(config, heads, (None, group + 2), head) if config.qkv_bias else None
        inputs = (heads, (None, group), head)
        self.o = weight(config, rngs, hidden, *inputs, bits=bits, inputs=3, parts=config.shards)
        self.o_bias = bias(config, hidden) if config.o_bias else None
        self.q_norm = RMSNorm(config, config.head_dim, None) if config.qk_norm else None
        self.k_norm = RMSNorm(config, config.head_dim, None) if config.qk_norm else None

    def __call__(
        self,
        x: Rows,
        cos: Float[Array, "T D//2"],
        sin: Float[Array, "T D//2"],
        attend: Attend,
        residual: Float[Array, "T E"],
        total: Total | None = None,
    ) -> Float[Array, "T E"]:
        """x [T, E] and the rotations of its positions -> the residual and what attention adds to it."""
        qkv = matmul(x, self.qkv[...], backend=self.backend)
        if self.qkv_bias is not None:
            qkv += self.qkv_bias[...]
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight[...], self.k_norm.weight[...], self.q_norm.eps)
        out = attend(Rotated(qkv, cos, sin, norms))
        add = partial(matmul, out, self.o[...], contract=3, total=total, backend=self.backend)
        return add(residual=residual) if self.o_bias is None else residual + (add() + self.o_bias[...])


class MLP(nnx.Module):
    """SwiGLU feed-forward; `gate_up` [N, 2, I/N, E] holds both projections in N parts, so that one axis splits it."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, bits: int | None = None):
        self.backend = config.kernel_backend
        inner, hidden = ("mlp", config.intermediate_size), ("embed", config.hidden_size)
        parts = gate_up_axes(config, config.intermediate_size)
        self.gate_up = weight(config, rngs, *parts, hidden, bits=bits)
        self.gate_up_bias = bias(config, *parts) if config.mlp_bias else None
        self.down = weight(config, rngs, hidden, inner, bits=bits, parts=config.shards)
        self.down_bias = bias(config, hidden) if config.mlp_bias else None

    def __call__(self, x: Rows, residual: Float[Array, "T E"], total: Total | None = None) -> Float[Array, "T E"]:
        gate_up = matmul(x, self.gate_up[...], backend=self.backend)
        if self.gate_up_bias is not None:
            gate_up += self.gate_up_bias[...]
        add = partial(matmul, Gated(gate_up), self.down[...], total=total, backend=self.backend)
        return add(residual=residual) if self.down_bias is None else residual + (add() + self.down_bias[...])


def gate_up_axes(config: ModelConfig, inner: int) -> tuple[Axis, Axis, Axis]:
    """The axes [N, 2, inner/N] of fused gate and up projections.

    Not [inner, 2]: XLA's CPU backend takes three times as long to multiply numbers that lie two apart.
    """
    return ("mlp", config.shards), (None, 2), (None, inner // config.shards)


FeedForward = Callable[..., nnx.Module]
"""(config, rngs=..., bits=...) -> a module (`Rows` [T, E], residual [T, E], total) -> the residual and what it adds."""


class DecoderLayer(nnx.Module):
    """One transformer layer: attention and feed-forward, each after a norm and added to its input.

    `feed_forward` makes the second half: `MLP`, or a mixture of experts.

    Called with one device's shares of the parameters, it needs `total` to add up what the devices have of the products
    over a split axis; everything between those is a device's own affair.

    Layers of the same kind and precision have equal graph definitions: nothing in them depends on their number.
    """

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, feed_forward: FeedForward = MLP, bits: int | None = None
    ):
        self.input_norm = RMSNorm(config, config.hidden_size, "embed")
        self.attention = Attention(config, rngs=rngs, bits=bits)
        self.post_norm = RMSNorm(config, config.hidden_size, "embed")
        self.mlp = feed_forward(config, rngs=rngs, bits=bits)

    def __call__(
        self,
        x: Float[Array, "T E"],
        cos: Float[Array, "T D//2"],
        sin: Float[Array, "T D//2"],
        attend: Attend,
        total: Total | None = None,
    ) -> Float[Array, "T E"]:
        """x and the rotations (float32) of its positions -> the next layer's x."""
        x = self.attention(self.input_norm.before_product(x), cos, sin, attend, x, total)
        return self.mlp(self.post_norm.before_product(x), x, total)


class Embed(nnx.Module):
    """Token embedding."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, bits: int | None = None):
        self.dtype = config.dtype
        self.weight = weight(config, rngs, ("vocab", config.vocab_rows), ("embed", config.hidden_size), bits=bits)

    def __call__(self, tokens: Int[Array, "T"]) -> Float[Array, "T E"]:
        """The tokens' embeddings; those of ids beyond the vocabulary, which padding has, are zeros."""
        take = partial(jnp.take, indices=tokens, axis=0, mode="fill", fill_value=0)
        rows = jax.tree.map(take, self.weight[...])
        return rows.dequantize(self.dtype) if isinstance(rows, QArray) else rows


class Head(nnx.Module):
    """Final norm and projection to the vocabulary.

    With tied embeddings `weight` is that of `Embed`.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, bits: int | None = None):
        self.vocab_size = config.vocab_size
        self.backend = config.kernel_backend
        self.norm = RMSNorm(config, config.hidden_size, "embed")
        self.weight = weight(config, rngs, ("vocab", config.vocab_rows), ("embed", config.hidden_size), bits=bits)

    def __call__(self, x: Float[Array, "R E"], whole: Callable[[Array], Array] | None = None) -> Float[Array, "R V"]:
        """Logits in float32; -inf in the rows added to the vocabulary as padding.

        `whole` joins what the devices have of the vocabulary, [R, share] -> [R, V], where each has a share.
        """
        logits = matmul(self.norm.before_product(x), self.weight[...], dtype=jnp.float32, backend=self.backend)
        if whole is not None:
            logits = whole(logits)
        if logits.shape[-1] == self.vocab_size:
            return logits
        return jnp.where(jnp.arange(logits.shape[-1]) < self.vocab_size, logits, -jnp.inf)
