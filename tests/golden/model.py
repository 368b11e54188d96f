"""A checkpoint run without an engine, and the results of Transformers for it."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.checkpoint import open_checkpoint
from jaxserve.core.config import ModelConfig
from jaxserve.models.dense import forward, restore_block
from tests.golden.cases import CASES
from tests.golden.weights import write_checkpoint

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Golden:
    """A case: how its checkpoint is made, and Transformers' results in float32."""

    name: str
    seed: int
    tensors: dict[str, list[int]]
    prompt: list[int]
    greedy: list[int]

    def write(self, directory: Path, shards: int = 1) -> Path:
        return write_checkpoint(directory, CASES[self.name], self.tensors, self.seed, shards)

    def logits(self) -> np.ndarray:
        """float32 [len(prompt), V]"""
        return np.load(FOLDER / f"{self.name}.npy")


@cache
def golden_json() -> dict:
    return json.loads((FOLDER / "golden.json").read_text())


def golden(name: str) -> Golden:
    return Golden(name, **golden_json()["cases"][name])


class Model:
    """All blocks of a checkpoint, compiled as one function of sequences padded to `length` tokens."""

    def __init__(self, path: Path, dtype: str = "float32", padded_to: ModelConfig | None = None, length: int = 104):
        checkpoint = open_checkpoint(path, dtype=dtype)
        config = padded_to or checkpoint.config
        blocks = {name: restore_block(config, name, checkpoint.block(name, config)) for name in config.block_ids}
        self.length, self.config = length, config
        self._forward = jax.jit(lambda tokens: forward(config, blocks, tokens))

    def logits(self, tokens: list[int]) -> np.ndarray:
        """float32 [len(tokens), V]"""
        padded = np.zeros(self.length, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(self._forward(jnp.asarray(padded)))[: len(tokens)]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference divided by the largest expected value."""
    return float(np.abs(got - expected).max() / np.abs(expected).max())
