"""Layers shared by all model families: norm, attention, feed-forward, and the three kinds of block.

Axes: T tokens, R rows, E hidden, K kv heads, G query heads per kv head, D head_dim, I intermediate, V vocabulary.
Parameters are stored [outputs..., inputs...] and name their logical axes in their metadata `axes`; the axis that tensor
parallelism splits comes first among the outputs or first among the inputs. Activations have the dtype of the
parameters; norms and rotations are computed in float32.

The large matrices of a layer, the embedding and the head may be quantised: with `bits` given, their parameter is a
QArray, whose leaves have the axes of the outputs and then the first axis of the inputs. Biases and norms keep full
precision.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.core.config import ModelConfig
from jaxserve.kernels import AllReduce, DeferredNorm, DeferredSwiGLU, HeadNorms, LeftOperand, ProjectedQKV, matmul
from jaxserve.models.quantized import random_qarray, wanted_group
from jaxserve.quantization import QArray

Attend = Callable[[ProjectedQKV], Float[Array, "T K G D"]]
"""An attention function from queries, keys and values to outputs. The caller decides which tokens see each other."""

INIT_STDDEV = 0.02

Axis = tuple[str | None, int]
"""The logical name and the size of an axis."""


def weight(
    config: ModelConfig, rngs: nnx.Rngs, *axes: Axis, bits: int | None = None, inputs: int = 1, parts: int = 1
) -> nnx.Param:
    """Return a random parameter with the given axes, of which a product contracts the last `inputs`.

    With `bits` the parameter is a QArray whose codes have `bits` bits. Tensor parallelism cuts its inputs into `parts`
    shares.
    """
    names, shape = zip(*axes, strict=True)
    if bits is None:
        value = jax.random.normal(rngs.params(), shape, jnp.float32) * INIT_STDDEV
        return nnx.Param(value.astype(config.dtype), axes=names)
    out, size = shape[:-inputs], math.prod(shape[-inputs:])
    group = wanted_group(config, bits)
    value = random_qarray(rngs.params(), out, size, bits, parts, INIT_STDDEV, group)
    return nnx.Param(value, axes=names[: len(out) + 1])


def bias(config: ModelConfig, *axes: Axis) -> nnx.Param:
    """Return a parameter of zeros with the given axes."""
    names, shape = zip(*axes, strict=True)
    return nnx.Param(jnp.zeros(shape, config.dtype), axes=names)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis, then a learned scale [size]."""

    def __init__(self, config: ModelConfig, size: int, axis: str | None):
        self.eps = config.rms_norm_eps
        self.weight = nnx.Param(jnp.ones((size,), config.dtype), axes=(axis,))

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        """Return the normalised rows."""
        return self.deferred(x).value()

    def deferred(self, x: Float[Array, "*rows size"]) -> DeferredNorm:
        """Return the normalisation of x as an operand, for the product that consumes it to compute."""
        return DeferredNorm(x, self.weight[...], self.eps)


class Attention(nnx.Module):
    """Grouped-query attention around the `Attend` that the caller passes.

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
        x: LeftOperand,
        cos: Float[Array, "T D//2"],
        sin: Float[Array, "T D//2"],
        attend: Attend,
        residual: Float[Array, "T E"],
        all_reduce: AllReduce | None = None,
    ) -> Float[Array, "T E"]:
        """Return `residual` plus the output of attention over x [T, E]; `cos` and `sin` rotate its positions."""
        qkv = matmul(x, self.qkv[...], backend=self.backend)
        if self.qkv_bias is not None:
            qkv += self.qkv_bias[...]
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight[...], self.k_norm.weight[...], self.q_norm.eps)
        out = attend(ProjectedQKV(qkv, cos, sin, norms))
        add = partial(matmul, out, self.o[...], contract=3, all_reduce=all_reduce, backend=self.backend)
        return add(residual=residual) if self.o_bias is None else residual + (add() + self.o_bias[...])


class MLP(nnx.Module):
    """A SwiGLU feed-forward.

    `gate_up` [N, 2, I/N, E] holds both projections in N parts, so that one axis splits it over devices.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, bits: int | None = None):
        self.backend = config.kernel_backend
        inner, hidden = ("mlp", config.intermediate_size), ("embed", config.hidden_size)
        parts = gate_up_axes(config, config.intermediate_size)
        self.gate_up = weight(config, rngs, *parts, hidden, bits=bits)
        self.gate_up_bias = bias(config, *parts) if config.mlp_bias else None
        self.down = weight(config, rngs, hidden, inner, bits=bits, parts=config.shards)
        self.down_bias = bias(config, hidden) if config.mlp_bias else None

    def __call__(
        self, x: LeftOperand, residual: Float[Array, "T E"], all_reduce: AllReduce | None = None
    ) -> Float[Array, "T E"]:
        """Return `residual` plus the output of the feed-forward for x [T, E]."""
        gate_up = matmul(x, self.gate_up[...], backend=self.backend)
        if self.gate_up_bias is not None:
            gate_up += self.gate_up_bias[...]
        add = partial(matmul, DeferredSwiGLU(gate_up), self.down[...], all_reduce=all_reduce, backend=self.backend)
        return add(residual=residual) if self.down_bias is None else residual + (add() + self.down_bias[...])


def gate_up_axes(config: ModelConfig, inner: int) -> tuple[Axis, Axis, Axis]:
    """Return the axes [N, 2, inner/N] of fused gate and up projections.

    They are not [inner, 2], because XLA's CPU backend multiplies numbers that lie two apart three times slower.
    """
    return ("mlp", config.shards), (None, 2), (None, inner // config.shards)


FeedForward = Callable[..., nnx.Module]
"""A constructor (config, rngs=..., bits=...) of feed-forward modules, which are called like `MLP`."""


class DecoderLayer(nnx.Module):
    """A transformer layer: attention and feed-forward, each applied after a norm and added to its input.

    `feed_forward` constructs the second half: `MLP` or a mixture of experts.

    With one device's shares of the parameters the layer needs `all_reduce`, which sums the devices' partial products
    over a split axis. All other operations are local to a device.

    Layers of equal kind and precision have equal graph definitions: nothing in them depends on their index.
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
        all_reduce: AllReduce | None = None,
    ) -> Float[Array, "T E"]:
        """Return the next layer's x; `cos` and `sin` (float32) rotate the positions of x."""
        x = self.attention(self.input_norm.deferred(x), cos, sin, attend, x, all_reduce)
        return self.mlp(self.post_norm.deferred(x), x, all_reduce)


class Embed(nnx.Module):
    """The token embedding."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, bits: int | None = None):
        self.dtype = config.dtype
        self.weight = weight(config, rngs, ("vocab", config.vocab_rows), ("embed", config.hidden_size), bits=bits)

    def __call__(self, tokens: Int[Array, "T"]) -> Float[Array, "T E"]:
        """Return the embeddings of the tokens; ids beyond the vocabulary, as in padding, give zeros."""
        take = partial(jnp.take, indices=tokens, axis=0, mode="fill", fill_value=0)
        rows = jax.tree.map(take, self.weight[...])
        return rows.dequantize(self.dtype) if isinstance(rows, QArray) else rows


class Head(nnx.Module):
    """The final norm and the projection to the vocabulary.

    With tied embeddings `weight` is the parameter of `Embed`.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, bits: int | None = None):
        self.vocab_size = config.vocab_size
        self.backend = config.kernel_backend
        self.norm = RMSNorm(config, config.hidden_size, "embed")
        self.weight = weight(config, rngs, ("vocab", config.vocab_rows), ("embed", config.hidden_size), bits=bits)

    def __call__(
        self, x: Float[Array, "R E"], all_gather: Callable[[Array], Array] | None = None
    ) -> Float[Array, "R V"]:
        """Return the logits in float32, -inf for the padding of the vocabulary.

        Where each device has a share of the vocabulary, `all_gather` joins the shares: [R, share] -> [R, V].
        """
        logits = matmul(self.norm.deferred(x), self.weight[...], dtype=jnp.float32, backend=self.backend)
        if all_gather is not None:
            logits = all_gather(logits)
        if logits.shape[-1] == self.vocab_size:
            return logits
        return jnp.where(jnp.arange(logits.shape[-1]) < self.vocab_size, logits, -jnp.inf)
