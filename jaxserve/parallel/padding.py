"""Weights padded so that they split evenly over devices, without changing the function that the model computes.

A kv head cannot be cut. Where there are fewer kv heads than devices each is copied, and its query heads are dealt out
to the copies; where the numbers do not divide, heads of zeros are added. An added query head is harmless because the
output projection is zero for it, an added unit of the feed-forward because its gate is. Host side only: numpy.

What is packed lies so that it need not be copied again where the host is the device (`core.aligned`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxserve.core.aligned_arrays import aligned, aligned_zeros
from jaxserve.core.config import ModelConfig
from jaxserve.core.numeric import ceil_div, round_up


def padded_config(config: ModelConfig, tp: int, unit: int = 1) -> ModelConfig:
    """The configuration whose shapes split over `tp` devices; the configuration itself where they already do.

    `unit`: what the inputs that a device has of a split weight must be a multiple of. Quantised weights are packed in
    units and share scales in groups, which cannot be cut either.
    """
    kv_heads, group = _heads(config, tp)
    group = round_up(group, unit // math.gcd(unit, kv_heads // tp * config.head_dim))
    moe = config.moe and replace(config.moe, intermediate_size=round_up(config.moe.intermediate_size, tp * unit))
    return replace(
        config,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        intermediate_size=round_up(config.intermediate_size, tp * unit),
        moe=moe,
        shards=tp,
        vocab_padding=round_up(config.vocab_size, tp) - config.vocab_size,
    )


def _heads(config: ModelConfig, tp: int) -> tuple[int, int]:
    """Physical kv heads, and query heads per kv head."""
    kv_heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    if tp % kv_heads == 0:
        return tp, ceil_div(group, (tp // kv_heads))
    return round_up(kv_heads, tp), group


def head_sources(config: ModelConfig, physical: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Which query heads [K', G'] and kv heads [K'] of `config` the physical ones are; -1 for a head of zeros."""
    kv_heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    new_kv_heads, new_group = physical.num_kv_heads, physical.num_heads // physical.num_kv_heads
    copies = new_kv_heads // kv_heads if new_kv_heads % kv_heads == 0 else 1
    kv, copy = np.divmod(np.arange(new_kv_heads), copies)
    member = copy[:, None] * new_group + np.arange(new_group)  # of the kv head's query heads
    query = np.where((member < group) & (kv[:, None] < kv_heads), kv[:, None] * group + member, -1)
    return query, np.where(kv < kv_heads, kv, -1)


def pack_qkv(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, config: ModelConfig, physical: ModelConfig, dtype: np.dtype
) -> np.ndarray:
    """Projections q [H*D, ...], k and v [K*D, ...] (or their biases) as one array [K', G' + 2, D, ...]."""
    query, kv = head_sources(config, physical)
    q, k, v = (x.reshape(-1, config.head_dim, *x.shape[1:]) for x in (q, k, v))
    packed = aligned_zeros((len(query), query.shape[1] + 2, *q.shape[1:]), dtype)
    for j, (heads, head) in enumerate(zip(query, kv, strict=True)):
        for g, source in enumerate(heads):
            if source >= 0:
                packed[j, g] = q[source]
        if head >= 0:
            packed[j, -2], packed[j, -1] = k[head], v[head]
    return packed


def pack_o(o: np.ndarray, config: ModelConfig, physical: ModelConfig, dtype: np.dtype) -> np.ndarray:
    """The output projection [E, H*D] as [E, K', G', D]."""
    query, _ = head_sources(config, physical)
    o = o.reshape(len(o), -1, config.head_dim)
    packed = aligned_zeros((len(o), *query.shape, config.head_dim), dtype)
    for (j, g), source in np.ndenumerate(query):
        if source >= 0:
            packed[:, j, g] = o[:, source]
    return packed


def pack_gate_up(gates: Sequence[np.ndarray], size: int, shards: int, dtype: np.dtype) -> np.ndarray:
    """The gate and the up projection [I, ...] (or their biases), in this order, as [shards, 2, size/shards, ...]."""
    packed = aligned_zeros((shards, 2, size // shards, *gates[0].shape[1:]), dtype)
    fill_gate_up(packed, gates)
    return packed


def fill_gate_up(packed: np.ndarray, gates: Sequence[np.ndarray]) -> None:
    """As `pack_gate_up`, into zeros [shards, 2, size/shards, ...]. Mutates."""
    step = packed.shape[2]
    for shard, parts in enumerate(packed):
        for part, x in zip(parts, gates, strict=True):
            own = x[shard * step : (shard + 1) * step]
            part[: len(own)] = own


def pad(x: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """x in the given dtype with zeros after it along every axis up to the given shape: x itself if it is so already."""
    if (x.shape, x.dtype) == (shape, dtype):
        return aligned(x)
    padded = aligned_zeros(shape, dtype)
    fill(padded, x)
    return padded


def cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x in the given dtype: x itself if it has it already."""
    return pad(x, x.shape, dtype)


def fill(padded: np.ndarray, x: np.ndarray) -> None:
    """As `pad`, into zeros. Mutates."""
    padded[tuple(slice(n) for n in x.shape)] = x
