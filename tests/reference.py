"""The same dummy model without a cache, a batch or an engine: what the engine's answers are compared with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.loader import LoadFormat
from jaxserve.core.config import ModelConfig
from jaxserve.models.dense import forward, restore_block
from jaxserve.models.layers import Head

LENGTH = 256  # every sequence is padded to this, so that one compilation serves all


class Reference:
    """A checkpoint's modules, by default a dummy's, run over whole sequences."""

    def __init__(
        self,
        model: Path,
        layers: Mapping[int, str] | None = None,
        load_format: LoadFormat = "dummy",
        dtype: Literal["auto", "float32"] = "auto",
        physical: ModelConfig | None = None,
    ):
        """`layers`: the precisions of some, by their numbers; the others have that of the checkpoint.

        `physical`: padded for tensor parallelism, which decides how weights are grouped when they are rounded.
        """
        checkpoint = open_checkpoint(model, load_format, dtype)
        self.config = physical or checkpoint.config
        precisions = {f"layers.{number}": precision for number, precision in (layers or {}).items()}
        self.blocks = {}
        for name in self.config.block_ids:
            precision = precisions.get(name, self.config.dtype)
            self.blocks[name] = restore_block(
                self.config, name, checkpoint.variant(name, precision, self.config), precision
            )
        self._logits = jax.jit(lambda tokens: forward(self.config, self.blocks, tokens))
        self._hidden = jax.jit(lambda tokens: forward(self.config, self.blocks | {"head": self._norm}, tokens))

    def logits(self, tokens: list[int]) -> np.ndarray:
        """float32[len(tokens), V]"""
        return self._run(self._logits, tokens)

    def hidden(self, tokens: list[int]) -> np.ndarray:
        """The normalised last hidden states, float32[len(tokens), E]."""
        return self._run(self._hidden, tokens)

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        return np.asarray(jax.nn.log_softmax(self.logits(tokens), axis=-1))

    def greedy(self, prompt: list[int], count: int) -> tuple[int, ...]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tuple(tokens[len(prompt) :])

    def _norm(self, x: jax.Array) -> jax.Array:
        head = self.blocks["head"]
        assert isinstance(head, Head)
        return head.norm(x)

    @staticmethod
    def _run(function, tokens: list[int]) -> np.ndarray:
        padded = np.zeros(LENGTH, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(function(jnp.asarray(padded)))[: len(tokens)]
