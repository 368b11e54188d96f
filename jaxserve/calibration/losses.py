"""The loss of quantised layers on held-out text, measured while the layers are made.

Axes: N pieces of L tokens, E hidden, V vocabulary.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.calibration.pipeline import ROUNDING, QuantizationSettings
from jaxserve.calibration.sensitivity.chain import logits, run_layer
from jaxserve.checkpoint.loader import Checkpoint
from jaxserve.checkpoint.rounding import rounded_layer
from jaxserve.checkpoint.variants import Loss
from jaxserve.core.block_names import layer_name
from jaxserve.models.dense import restore_block
from jaxserve.quantization.layer import Leaves


class HeldOut:
    """Held-out text that a model reads in full precision, rounded and quantised, one layer at a time, in float32."""

    def __init__(self, checkpoint: Checkpoint, pieces: Int[np.ndarray, "N L"], settings: QuantizationSettings):
        self._checkpoint = replace(checkpoint, config=replace(checkpoint.config, dtype="float32"))
        self._pieces, self._settings = pieces, settings
        config, tokens = self._checkpoint.config, pieces[:, :-1]
        embed = restore_block(config, "embed", self._checkpoint.block("embed"))
        x = embed(jnp.asarray(tokens.reshape(-1))).reshape(*tokens.shape, -1)
        self._full = x
        self._rounded, self._quantised = dict.fromkeys(settings.precisions, x), dict.fromkeys(settings.precisions, x)
        self._index: int | None = None
        self._leaves: Leaves = {}  # of the layer that is being read, in full precision

    def read(self, index: int, precision: str, leaves: Leaves) -> None:
        """Read a layer in a precision. All precisions of a layer come before the next layer."""
        config, settings = self._checkpoint.config, self._settings
        if index != self._index:
            self._index, self._leaves = index, self._checkpoint.block(layer_name(index))
            self._full = run_layer(config, index, self._leaves, self._full)
        self._quantised[precision] = run_layer(config, index, leaves, self._quantised[precision])
        if settings.method == ROUNDING:
            return
        rounded = rounded_layer(self._leaves, settings.format_of(precision, config))
        self._rounded[precision] = run_layer(config, index, rounded, self._rounded[precision])

    def losses(self) -> dict[str, Loss]:
        """Return what each precision has lost after the last layer."""
        config = self._checkpoint.config
        graph, state = nnx.split(restore_block(config, "head", self._checkpoint.block("head")))
        targets = jnp.asarray(self._pieces[:, 1:])
        full = float(_cross_entropy(graph, state, self._full, targets))

        def lost(x: Float[Array, "N S E"]) -> float:
            return float(_cross_entropy(graph, state, x, targets)) - full

        quantised = {precision: lost(x) for precision, x in self._quantised.items()}
        rounded = quantised if self._settings.method == ROUNDING else {p: lost(x) for p, x in self._rounded.items()}
        return {precision: Loss(full, rounded[precision], quantised[precision]) for precision in quantised}


@partial(jax.jit, static_argnums=0)
def _cross_entropy(
    graph: nnx.GraphDef, state: nnx.State, x: Float[Array, "N S E"], targets: Int[Array, "N S"]
) -> Float[Array, ""]:
    def of_piece(piece: tuple[Array, Array]) -> Array:  # one at a time, because a vocabulary is large
        z = logits(graph, state, piece[0])
        return (jax.nn.logsumexp(z, axis=-1) - jnp.take_along_axis(z, piece[1][:, None], axis=-1)[:, 0]).mean()

    return jax.lax.map(of_piece, (x, targets)).mean()
