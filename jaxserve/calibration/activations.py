"""The inputs of every weight when a model reads calibration text, computed one layer at a time.

Axes: N sequences of L tokens, B of them at once, E hidden, C inputs of a weight (its contracted axes as one).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.calibration.sensitivity.chain import rows_attend
from jaxserve.checkpoint.loader import Checkpoint
from jaxserve.core.block_names import layer_name
from jaxserve.core.config import ModelConfig
from jaxserve.kernels import DeferredSwiGLU, ProjectedQKV, matmul
from jaxserve.models import DecoderLayer, rope_cos_sin
from jaxserve.models.dense import restore_block
from jaxserve.models.layers import MLP

BATCH_TOKENS = 4096  # tokens that a layer reads at once
EPSILON = 1e-6


@dataclass(frozen=True)
class Inputs:
    """Means over all calibration text of the inputs x of one weight.

    Inputs of products that add to the residual stream are divided by its root mean square at each token. The next norm
    divides by it as well, so that an error counts by its share. Otherwise the first token of a text would outweigh all
    others in many models: its residual stream is hundreds of times larger.
    """

    mean_abs: Float[Array, "C"]
    mean_square: Float[Array, "C"]
    gram: Float[Array, "C C"] | None  # the mean of x xᵀ, if `calibrate` was called with `gram`


class Calibrated(NamedTuple):
    """A layer's parameters in float32, and the inputs of its weights by the names of the weights."""

    index: int
    leaves: dict[str, np.ndarray]
    inputs: dict[str, Inputs]


def calibrate(checkpoint: Checkpoint, tokens: Int[np.ndarray, "N L"], *, gram: bool = False) -> Iterator[Calibrated]:
    """Yield every layer in order with the inputs of its weights.

    Layers run in full precision and in float32, so that no layer's error reaches the next one. Memory holds the
    parameters of one layer and the hidden states of all the text. The down projections of experts are not observed,
    because each expert sees different tokens.
    """
    checkpoint = replace(checkpoint, config=replace(checkpoint.config, dtype="float32"))
    config = checkpoint.config
    embed = restore_block(config, "embed", checkpoint.block("embed"))
    hidden = [embed(jnp.asarray(batch.reshape(-1))).reshape(*batch.shape, -1) for batch in _batches(tokens)]
    del embed
    for index in range(config.num_layers):
        leaves = checkpoint.block(layer_name(index))
        graph, state = nnx.split(restore_block(config, layer_name(index), leaves))
        observe = partial(_observe, config, graph, config.window(index), gram, state)
        observed = []
        for i, x in enumerate(hidden):
            hidden[i], seen = observe(x)
            observed.append(seen)
        del graph, state, observe
        yield Calibrated(index, leaves, jax.tree.map(lambda *each: sum(each) / len(each), *observed))


def _batches(tokens: Int[np.ndarray, "N L"]) -> list[Int[np.ndarray, "B L"]]:
    """Divide the sequences into batches of one size, so that one program is enough."""
    rows, length = tokens.shape
    count = next(n for n in range(1, rows + 1) if rows % n == 0 and (rows // n * length <= BATCH_TOKENS or n == rows))
    return np.split(tokens, count)


jax.tree_util.register_dataclass(Inputs, data_fields=["mean_abs", "mean_square", "gram"], meta_fields=[])


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _observe(
    config: ModelConfig, graph: nnx.GraphDef, window: int | None, gram: bool, state: nnx.State,
    x: Float[Array, "B L E"],
) -> tuple[Float[Array, "B L E"], dict[str, Inputs]]:  # fmt: skip
    """Return the layer's output for a batch of sequences, and the inputs of its weights."""
    rows, length, size = x.shape
    attend = rows_attend(rows, length, window, config.head_dim)
    cos_sin = rope_cos_sin(config, jnp.tile(jnp.arange(length), rows))
    y, seen = _with_inputs(nnx.merge(graph, state), x.reshape(-1, size), *cos_sin, attend)

    def summary(x: Array) -> Inputs:
        x = x.reshape(rows * length, -1)
        return Inputs(jnp.abs(x).mean(axis=0), jnp.square(x).mean(axis=0), x.T @ x / len(x) if gram else None)

    return y.reshape(x.shape), {name: summary(inputs) for name, inputs in seen.items()}


def _with_inputs(
    layer: DecoderLayer, x: Array, cos: Array, sin: Array, attend: partial
) -> tuple[Array, Mapping[str, Array]]:
    """Return the result of `DecoderLayer.__call__`, and the inputs of its weights by name."""
    attended = None

    def keep_attended(qkv: ProjectedQKV) -> Array:
        nonlocal attended
        attended = attend(qkv)
        return attended

    normed = layer.input_norm(x)
    x = layer.attention(normed, cos, sin, keep_attended, x)
    inner = layer.post_norm(x)
    y = layer.mlp(inner, x)
    seen = {"attention.qkv": normed, "attention.o": attended.reshape(len(x), -1) / _rms(x)}
    if isinstance(layer.mlp, MLP):
        gate_up = matmul(inner, layer.mlp.gate_up[...])
        if layer.mlp.gate_up_bias is not None:
            gate_up += layer.mlp.gate_up_bias[...]
        seen |= {"mlp.gate_up": inner, "mlp.down": DeferredSwiGLU(gate_up).value().reshape(len(x), -1) / _rms(y)}
    else:
        seen |= {"mlp.experts_gate_up": inner}
    return y, seen


def _rms(x: Float[Array, "T E"]) -> Float[Array, "T 1"]:
    return jnp.sqrt(jnp.square(x).mean(axis=-1, keepdims=True) + EPSILON)
