"""A model run without a cache, a batch or an engine, with which the engine's answers are compared."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.loader import LoadFormat
from jaxserve.core.config import ModelConfig
from jaxserve.core.kv_layout import int8_row_bytes
from jaxserve.kernels import ProjectedQKV
from jaxserve.kernels.kv import from_storage, to_storage
from jaxserve.models import rope_cos_sin
from jaxserve.models.dense import dense_causal_attend, restore_block
from jaxserve.models.layers import Attend, Head

LENGTH = 256  # every sequence is padded to this, so that one compilation serves all


def turned(q: jax.Array, k: jax.Array, v: jax.Array) -> ProjectedQKV:
    """Return queries [T, K, G, D], keys and values [T, K, D] as rotated by no angle."""
    zeros = jnp.zeros((len(q), q.shape[-1] // 2), jnp.float32)
    return ProjectedQKV(jnp.concatenate((q, k[:, :, None], v[:, :, None]), axis=2), zeros + 1, zeros)


class Reference:
    """A checkpoint's modules, random ones by default, run over whole sequences."""

    def __init__(
        self,
        model: Path,
        layers: Mapping[int, str] | None = None,
        head: str | None = None,
        load_format: LoadFormat = "dummy",
        dtype: Literal["auto", "float32"] = "auto",
        padded_to: ModelConfig | None = None,
        kv_dtype: Literal["float32", "int8"] = "float32",
    ):
        """Load the blocks.

        `layers` maps some layers' indices to precisions, and `head` is the head's; other blocks have the checkpoint's.
        `padded_to` is the configuration padded for tensor parallelism, which decides how weights are grouped for
        rounding. Keys and values are attended to as a KV pool of `kv_dtype` would return them.
        """
        checkpoint = open_checkpoint(model, load_format, dtype)
        self.config = padded_to or checkpoint.config
        precisions = {f"layers.{number}": precision for number, precision in (layers or {}).items()}
        if head is not None:
            precisions |= {"head": head} | ({"embed": head} if self.config.tie_embeddings else {})
        self.blocks = {}
        for name in self.config.block_ids:
            precision = precisions.get(name, self.config.dtype)
            self.blocks[name] = restore_block(
                self.config, name, checkpoint.variant(name, precision, self.config), precision
            )
        self.kv_dtype = kv_dtype
        self._logits = jax.jit(lambda tokens: self.blocks["head"](self._states(tokens)))
        self._hidden = jax.jit(lambda tokens: self._norm(self._states(tokens)))

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return the logits (float32[len(tokens), V])."""
        return self._run(self._logits, tokens)

    def hidden(self, tokens: list[int]) -> np.ndarray:
        """Return the normalised last hidden states (float32[len(tokens), E])."""
        return self._run(self._hidden, tokens)

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        return np.asarray(jax.nn.log_softmax(self.logits(tokens), axis=-1))

    def greedy(self, prompt: list[int], count: int) -> tuple[int, ...]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tuple(tokens[len(prompt) :])

    def _states(self, tokens: jax.Array) -> jax.Array:
        """Return the hidden states [T, E] before the head."""
        config, positions = self.config, jnp.arange(len(tokens), dtype=jnp.int32)
        cos, sin = rope_cos_sin(config, positions)
        x = self.blocks["embed"](tokens)
        for layer in range(config.num_layers):
            attend = dense_causal_attend(positions, window=config.window(layer), scale=config.head_dim**-0.5)
            x = self.blocks[f"layers.{layer}"](x, cos, sin, self._stored(attend))
        return x

    def _stored(self, attend: Attend) -> Attend:
        """Return attention to keys and values as the cache would return them."""

        def read_back(x: jax.Array) -> jax.Array:
            rows = to_storage(x, jnp.dtype(self.kv_dtype), int8_row_bytes(x.shape[-1], "cpu"))
            return from_storage(rows, x.shape[-1], x.dtype, x.dtype)

        def attend_to_stored(qkv: ProjectedQKV) -> jax.Array:
            q, k, v = qkv.value()
            return attend(turned(q, read_back(k), read_back(v)))

        return attend_to_stored

    def _norm(self, x: jax.Array) -> jax.Array:
        head = self.blocks["head"]
        assert isinstance(head, Head)
        return head.norm(x)

    @staticmethod
    def _run(function, tokens: list[int]) -> np.ndarray:
        padded = np.zeros(LENGTH, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(function(jnp.asarray(padded)))[: len(tokens)]
