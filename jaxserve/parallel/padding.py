"""Padding of weights to split evenly over devices, without a change of the function that the model computes.

A kv head cannot be cut. If a model has fewer kv heads than devices, each kv head is copied and its query heads are
divided among the copies. If the numbers do not divide, heads of zeros are added. An added query head has no effect,
because its output projection is zero; an added unit of the feed-forward has none, because its gate is zero.

All of this runs on the host in numpy. Packed arrays are aligned, so that they need no further copy where the host is
the device (`core.aligned_arrays`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxserve.core.aligned_arrays import aligned, aligned_zeros
from jaxserve.core.config import ModelConfig
from jaxserve.core.numeric import ceil_div, round_up


def padded_config(config: ModelConfig, tp: int, unit: int = 1) -> ModelConfig:
    """Return the configuration padded to split over `tp` devices, or an equal one if it needs no padding.

    A device's inputs of a split weight are a multiple of `unit`, because the packed units and the groups of quantised
    weights cannot be cut either.
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
    """Return the padded number of kv heads, and of query heads per kv head."""
    kv_heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    if tp % kv_heads == 0:
        return tp, ceil_div(group, (tp // kv_heads))
    return round_up(kv_heads, tp), group


def head_sources(config: ModelConfig, padded: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the query head [K', G'] and kv head [K'] of `config` for each padded head; -1 for a head of zeros."""
    kv_heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    new_kv_heads, new_group = padded.num_kv_heads, padded.num_heads // padded.num_kv_heads
    copies = new_kv_heads // kv_heads if new_kv_heads % kv_heads == 0 else 1
    kv, copy = np.divmod(np.arange(new_kv_heads), copies)
    member = copy[:, None] * new_group + np.arange(new_group)  # index among the kv head's query heads
    query = np.where((member < group) & (kv[:, None] < kv_heads), kv[:, None] * group + member, -1)
    return query, np.where(kv < kv_heads, kv, -1)


def pack_qkv(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, config: ModelConfig, padded: ModelConfig, dtype: np.dtype
) -> np.ndarray:
    """Return projections q [H*D, ...], k and v [K*D, ...] (or their biases) as one array [K', G' + 2, D, ...]."""
    query, kv = head_sources(config, padded)
    q, k, v = (x.reshape(-1, config.head_dim, *x.shape[1:]) for x in (q, k, v))
    packed = aligned_zeros((len(query), query.shape[1] + 2, *q.shape[1:]), dtype)
    for j, (heads, head) in enumerate(zip(query, kv, strict=True)):
        for g, source in enumerate(heads):
            if source >= 0:
                packed[j, g] = q[source]
        if head >= 0:
            packed[j, -2], packed[j, -1] = k[head], v[head]
    return packed


def pack_o(o: np.ndarray, config: ModelConfig, padded: ModelConfig, dtype: np.dtype) -> np.ndarray:
    """Return the output projection [E, H*D] as [E, K', G', D]."""
    query, _ = head_sources(config, padded)
    o = o.reshape(len(o), -1, config.head_dim)
    packed = aligned_zeros((len(o), *query.shape, config.head_dim), dtype)
    for (j, g), source in np.ndenumerate(query):
        if source >= 0:
            packed[:, j, g] = o[:, source]
    return packed


def pack_gate_up(gates: Sequence[np.ndarray], size: int, shards: int, dtype: np.dtype) -> np.ndarray:
    """Return the gate and up projections [I, ...] (or their biases) as one array [shards, 2, size/shards, ...]."""
    packed = aligned_zeros((shards, 2, size // shards, *gates[0].shape[1:]), dtype)
    fill_gate_up(packed, gates)
    return packed


def fill_gate_up(packed: np.ndarray, gates: Sequence[np.ndarray]) -> None:
    """Write the gate and up projections into `packed` [shards, 2, size/shards, ...], which holds zeros."""
    step = packed.shape[2]
    for shard, parts in enumerate(packed):
        for part, x in zip(parts, gates, strict=True):
            own = x[shard * step : (shard + 1) * step]
            part[: len(own)] = own


def pad(x: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return x in the given dtype, padded with zeros at the end of every axis to `shape`. May return x itself."""
    if (x.shape, x.dtype) == (shape, dtype):
        return aligned(x)
    padded = aligned_zeros(shape, dtype)
    fill(padded, x)
    return padded


def cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return x in the given dtype. May return x itself."""
    return pad(x, x.shape, dtype)


def fill(padded: np.ndarray, x: np.ndarray) -> None:
    """Write x to the beginning of every axis of `padded`, which holds zeros."""
    padded[tuple(slice(n) for n in x.shape)] = x
