"""A checkpoint's layers, in full precision and quantised, applied to whole sequences one layer at a time.

Axes: N sequences of S tokens, E hidden, V vocabulary.
"""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.checkpoint import Checkpoint
from jaxserve.core.block_names import layer_index, layer_name
from jaxserve.core.config import ModelConfig
from jaxserve.kernels import ProjectedQKV
from jaxserve.models import Attend, abstract_block, rope_cos_sin
from jaxserve.models.dense import dense_causal_attend, restore_block
from jaxserve.quantization.layer import Leaves
from jaxserve.quantization.qarray import QArray

Hidden = Float[Array, "N S E"]
LayerFunction = Callable[[Hidden], Hidden]
Variants = Callable[[int, str], Mapping[str, np.ndarray | QArray]]
"""A function (index of a layer, precision) -> its parameters by dotted path."""


class LayerChain:
    """The blocks of a model as functions of hidden states [N, S, E].

    A quantised layer runs with its dequantised weights in the checkpoint's dtype, so that layers of one kind share an
    executable. Weights are read when a layer is requested, and cached if they fit into `keep_bytes`. Others are
    read again at each request, so callers should request a layer once and apply it to all hidden states.
    """

    def __init__(self, checkpoint: Checkpoint, variants: Variants, *, keep_bytes: int = 4 << 30):
        self.config = checkpoint.config
        self._checkpoint, self._variants = checkpoint, variants
        self._kept: dict[tuple[str, str | None], tuple[nnx.GraphDef, nnx.State]] = {}
        self._room = keep_bytes

    def embed(self, tokens: Int[Array, "N S"]) -> Hidden:
        """Return the hidden states before the first layer."""
        return _embed(*self._block("embed"), jnp.asarray(tokens))

    def layer(self, index: int, precision: str | None) -> LayerFunction:
        """Return a layer as a function of hidden states. A `precision` of None stands for the checkpoint's."""
        graph, state = self._block(layer_name(index), precision)
        return partial(_layer, self.config, graph, self.config.window(index), state)

    @property
    def head(self) -> tuple[nnx.GraphDef, nnx.State]:
        """The final norm and the projection to the vocabulary, for `logits`."""
        return self._block("head")

    def _block(self, block_id: str, precision: str | None = None) -> tuple[nnx.GraphDef, nnx.State]:
        if (block_id, precision) in self._kept:
            return self._kept[block_id, precision]
        graph, state = nnx.split(restore_block(self.config, block_id, self._arrays(block_id, precision)))
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        if size <= self._room:
            self._kept[block_id, precision] = graph, state
            self._room -= size
        return graph, state

    def _arrays(self, block_id: str, precision: str | None) -> Mapping[str, np.ndarray]:
        if precision is None:
            return self._checkpoint.block(block_id)
        return _dequantized(self.config, block_id, self._variants(layer_index(block_id), precision))


def run_layer(config: ModelConfig, index: int, leaves: Leaves, x: Hidden) -> Hidden:
    """Return the output of a layer, quantised or not, in the configuration's dtype."""
    block_id = layer_name(index)
    graph, state = nnx.split(restore_block(config, block_id, _dequantized(config, block_id, leaves)))
    return _layer(config, graph, config.window(index), state, x)


def _dequantized(config: ModelConfig, block_id: str, leaves: Leaves) -> dict[str, np.ndarray]:
    """Return a block's parameters in full."""
    _, expected = abstract_block(config, block_id)
    return {name: _in_full(leaves[name], variable.get_value()) for name, variable in expected.items()}


def _in_full(leaf: np.ndarray | QArray, expected: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return a leaf dequantised, in the shape and dtype that the module expects."""
    array = _dequantize(leaf) if isinstance(leaf, QArray) else leaf
    return np.asarray(array, expected.dtype).reshape(expected.shape)


_dequantize = jax.jit(QArray.dequantize)


@partial(jax.jit, static_argnums=0)
def _embed(graph: nnx.GraphDef, state: nnx.State, tokens: Int[Array, "N S"]) -> Hidden:
    return nnx.merge(graph, state)(tokens.reshape(-1)).reshape(*tokens.shape, -1)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _layer(config: ModelConfig, graph: nnx.GraphDef, window: int | None, state: nnx.State, x: Hidden) -> Hidden:
    rows, length, size = x.shape
    cos, sin = rope_cos_sin(config, jnp.tile(jnp.arange(length), rows))
    attend = rows_attend(rows, length, window, config.head_dim)
    return nnx.merge(graph, state)(x.reshape(-1, size), cos, sin, attend).reshape(x.shape)


def rows_attend(rows: int, length: int, window: int | None, head_dim: int) -> Attend:
    """Return dense causal attention within each of `rows` concatenated sequences, T = rows * length tokens in all."""
    attend = dense_causal_attend(jnp.arange(length), window=window, scale=head_dim**-0.5)

    def each(qkv: ProjectedQKV) -> jax.Array:
        apart = (x.reshape(rows, length, *x.shape[1:]) for x in (qkv.parts, qkv.cos, qkv.sin))
        out = jax.vmap(lambda *of_row: attend(ProjectedQKV(*of_row, qkv.norms)))(*apart)
        return out.reshape(rows * length, *out.shape[2:])

    return each


def logits(graph: nnx.GraphDef, state: nnx.State, x: Float[Array, "S E"]) -> Float[Array, "S V"]:
    """Return the logits in float32. They are large: call this in a jitted function that keeps few of them at a time."""
    return nnx.merge(graph, state)(x)
