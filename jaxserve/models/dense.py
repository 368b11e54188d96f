"""Evaluation of a model on whole sequences without a KV cache.

It is the reference for the serving path, and the function that training differentiates.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.core.block_names import layer_name
from jaxserve.core.config import ModelConfig
from jaxserve.kernels import ProjectedQKV
from jaxserve.models.layers import Attend
from jaxserve.models.registry import abstract_block, block_state, build_block
from jaxserve.models.rope import rope_cos_sin
from jaxserve.quantization import QArray


def dense_causal_attend(
    positions: Int[Array, "T"], segments: Int[Array, "T"] | None = None, *, window: int | None = None, scale: float
) -> Attend:
    """Return an `Attend` for softmax attention to a token's own and earlier positions.

    Tokens of different segments do not see each other. `window` limits the positions that a token sees, its own
    included.
    """
    distance = positions[:, None] - positions[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if segments is not None:
        visible &= segments[:, None] == segments[None, :]

    def attend(qkv: ProjectedQKV) -> Float[Array, "T K G D"]:
        q, k, v = qkv.value()
        scores = jnp.einsum("tkgd,skd->kgts", q, k, preferred_element_type=jnp.float32) * scale
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(v.dtype)
        return jnp.einsum("kgts,skd->tkgd", weights, v, preferred_element_type=jnp.float32).astype(q.dtype)

    return attend


def build_blocks(config: ModelConfig, *, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
    """Return all blocks of a model by id, with random weights.

    With tied embeddings the embedding and the head share their parameter.
    """
    blocks = {block_id: build_block(config, block_id, rngs=rngs) for block_id in config.block_ids}
    if config.tie_embeddings:
        blocks["head"].weight = blocks["embed"].weight
    return blocks


def restore_block(
    config: ModelConfig, block_id: str, arrays: Mapping[str, np.ndarray | QArray], precision: str | None = None
) -> nnx.Module:
    """Return a block with the given parameters, whose keys are dotted paths in the module."""
    graphdef, variables = abstract_block(config, block_id, precision)
    return nnx.merge(graphdef, jax.tree.map(jnp.asarray, block_state(variables, arrays)))


def forward(
    config: ModelConfig,
    blocks: Mapping[str, nnx.Module],
    tokens: Int[Array, "T"],
    positions: Int[Array, "T"] | None = None,
    segments: Int[Array, "T"] | None = None,
) -> Float[Array, "T V"]:
    """Return the logits of every token in float32. By default the tokens are one sequence from position 0 on."""
    if positions is None:
        positions = jnp.arange(len(tokens), dtype=jnp.int32)
    cos, sin = rope_cos_sin(config, positions)
    x = blocks["embed"](tokens)
    for layer in range(config.num_layers):
        attend = dense_causal_attend(positions, segments, window=config.window(layer), scale=config.head_dim**-0.5)
        x = blocks[layer_name(layer)](x, cos, sin, attend)
    return blocks["head"](x)
