"""Angles of rotary position embedding (RoPE): default, linear, llama3 and yarn."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.core.config import ModelConfig, RopeConfig


def rope_cos_sin(
    config: ModelConfig, positions: Int[Array, "T"]
) -> tuple[Float[Array, "T D//2"], Float[Array, "T D//2"]]:
    """Return the cosines and sines (float32) of the rotation at each position."""
    frequencies, scale = rope_frequencies(config.rope, config.head_dim)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, np.float32]:
    """Return angular frequencies float32 [head_dim/2] in radians per token, and the factor on cosines and sines."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = 1 / np.float32(rope.theta) ** exponents
    if rope.kind == "linear":
        return base / np.float32(rope.factor), np.float32(1)
    if rope.kind == "llama3":
        return _llama3(rope, base), np.float32(1)
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim), np.float32(yarn_attention_factor(rope))
    return base, np.float32(1)


def _llama3(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    """Return frequencies of Llama 3.1: long wavelengths stretched by `factor`, short ones unchanged."""
    turns = rope.original_max_position * base / np.float32(2 * math.pi)  # over the original context
    weight = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _mix(base, rope.factor, np.clip(weight, 0, 1))


def _yarn(rope: RopeConfig, base: np.ndarray, head_dim: int) -> np.ndarray:
    """Return frequencies of YaRN (arXiv:2309.00071, section 3.2): unchanged where they make many turns."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low if high != low else 0.001)
    return _mix(base, rope.factor, 1 - np.clip(ramp, 0, 1))


def _mix(base: np.ndarray, factor: float, weight: np.ndarray) -> np.ndarray:
    """Return the mean of frequencies (`weight` in [0, 1]) and of frequencies divided by `factor` (1 - `weight`)."""
    return (base * weight + base / factor * (1 - weight)).astype(np.float32)


def yarn_attention_factor(rope: RopeConfig) -> float:
    """Return YaRN's factor on cosines and sines; its square multiplies the attention logits."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1
