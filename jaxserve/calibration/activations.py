"""The inputs of every weight when a model reads calibration text, computed one layer at a time.

Axes: L tokens of a sequence, E hidden, C inputs of a weight (its contracted axes as one), R sampled rows of inputs.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.checkpoint.loader import Checkpoint
from jaxserve.core.block_names import layer_name
from jaxserve.core.config import ModelConfig
from jaxserve.core.numeric import ceil_div
from jaxserve.kernels import DeferredSwiGLU, ProjectedQKV, matmul
from jaxserve.models import DecoderLayer, rope_cos_sin
from jaxserve.models.dense import dense_causal_attend, restore_block
from jaxserve.models.layers import MLP

MAX_ROWS = 2048  # sampled rows of inputs for each weight


@dataclass(frozen=True)
class Inputs:
    """Statistics of the inputs x of one weight over all calibration text."""

    rows: Float[Array, "R C"]
    mean_abs: Float[Array, "C"]
    gram: Float[Array, "C C"] | None  # the mean of x xᵀ, if `calibrate` was called with `gram`


class _Observed:
    """Statistics of one weight's inputs, collected over sequences."""

    def __init__(self) -> None:
        self._rows: list[Array] = []  # joined once, because joining pairs would compile a program for every length
        self._sums: tuple[Array, Array | None] | None = None

    def add(self, seen: Inputs) -> None:
        """Add the inputs of one more sequence."""
        self._rows.append(seen.rows)
        more = (seen.mean_abs, seen.gram)
        self._sums = more if self._sums is None else jax.tree.map(jnp.add, self._sums, more)

    def mean(self) -> Inputs:
        """Return the rows of all sequences, and the means over the sequences."""
        mean_abs, gram = jax.tree.map(lambda total: total / len(self._rows), self._sums)
        return Inputs(jnp.concatenate(self._rows), mean_abs, gram)


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
    hidden = [embed(jnp.asarray(sequence)) for sequence in tokens]
    del embed
    sampled = _spread(tokens.shape[1], ceil_div(MAX_ROWS, len(tokens)))
    for index in range(config.num_layers):
        leaves = checkpoint.block(layer_name(index))
        graph, state = nnx.split(restore_block(config, layer_name(index), leaves))
        observe = partial(_observe, config, graph, config.window(index), gram, state, sampled)
        observed: dict[str, _Observed] = defaultdict(_Observed)
        for i, x in enumerate(hidden):
            hidden[i], seen = observe(x)
            for name, inputs in seen.items():
                observed[name].add(inputs)
        del graph, state, observe
        yield Calibrated(index, leaves, {name: inputs.mean() for name, inputs in observed.items()})


def _spread(length: int, count: int) -> Int[np.ndarray, "R"]:
    """Return `count` positions spread evenly over a sequence."""
    return np.unique(np.linspace(0, length - 1, min(count, length)).astype(np.int32))


jax.tree_util.register_dataclass(Inputs, data_fields=["rows", "mean_abs", "gram"], meta_fields=[])


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _observe(
    config: ModelConfig,
    graph: nnx.GraphDef,
    window: int | None,
    gram: bool,
    state: nnx.State,
    sampled: Int[Array, "R"],
    x: Float[Array, "L E"],
) -> tuple[Float[Array, "L E"], dict[str, Inputs]]:
    """Return the layer's output for a sequence, and the inputs of its weights at the positions `sampled`."""
    positions = jnp.arange(len(x))
    attend = dense_causal_attend(positions, window=window, scale=config.head_dim**-0.5)
    y, seen = _with_inputs(nnx.merge(graph, state), x, *rope_cos_sin(config, positions), attend)

    def summary(x: Array) -> Inputs:
        x = x.reshape(len(positions), -1)
        return Inputs(x[sampled], jnp.abs(x).mean(axis=0), x.T @ x / len(x) if gram else None)

    return y, {name: summary(inputs) for name, inputs in seen.items()}


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
    seen = {"attention.qkv": normed, "attention.o": attended}
    if isinstance(layer.mlp, MLP):
        gate_up = matmul(inner, layer.mlp.gate_up[...])
        if layer.mlp.gate_up_bias is not None:
            gate_up += layer.mlp.gate_up_bias[...]
        seen |= {"mlp.gate_up": inner, "mlp.down": DeferredSwiGLU(gate_up).value()}
    else:
        seen |= {"mlp.experts_gate_up": inner}
    return layer.mlp(inner, x), seen
