"""Quantised layers as they are stored, in the layout of a model that is padded for tensor parallelism.

The codes are kept: heads and inputs move to their padded places, and what is added has the value 0. Inputs keep the
scales of their groups. Where inputs of two groups would come together, or a device's share would cut a group, groups
become smaller, so that some scales are stored several times.
"""

from collections.abc import Mapping
from functools import cache

import numpy as np

from jaxserve.checkpoint.mapping import numpy_dtype
from jaxserve.core.config import ModelConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.scale_groups import GROUPS
from jaxserve.parallel.padding import head_sources, pack_gate_up, pack_qkv
from jaxserve.quantization import QArray
from jaxserve.quantization.packing import pack, unpack

Leaf = np.ndarray | QArray
# Weights whose inputs are split by tensor parallelism.
SPLIT_INPUTS = ("attention.o", "mlp.down", "mlp.experts_down")


def fitted(leaves: Mapping[str, Leaf], config: ModelConfig, padded: ModelConfig) -> dict[str, Leaf]:
    """Return a stored layer of `config` in the model's dtype and in the layout of `padded`.

    Raise `ConfigError` if no group of inputs that the kernels support is left whole.
    """
    dtype = numpy_dtype(config)

    def fit(name: str, leaf: Leaf) -> Leaf:
        if not isinstance(leaf, QArray):
            return _fit_outputs(name, leaf.astype(dtype, copy=False), config, padded)
        if name in SPLIT_INPUTS:
            return _fit_inputs(name, leaf, config, padded)
        zeros = None if leaf.zeros is None else _fit_outputs(name, np.asarray(leaf.zeros), config, padded)
        # Outputs that are added have scales of 0, and therefore the value 0 whatever their codes are.
        codes, scales = (_fit_outputs(name, np.asarray(x), config, padded) for x in (leaf.codes, leaf.scales))
        return QArray(codes, scales, zeros, leaf.bits, leaf.size)

    return {name: fit(name, leaf) for name, leaf in leaves.items()}


def group_after(name: str, group: int, config: ModelConfig, padded: ModelConfig) -> int:
    """Return how many inputs share a scale in the layout of `padded`, if `group` of them do in that of `config`.

    Raise `ConfigError` if there is no such number that the kernels support.
    """
    if name not in SPLIT_INPUTS:
        return group
    sources = _inputs(name, config, padded)
    share = len(sources) // padded.shards
    for size in sorted({group, *GROUPS}, reverse=True):
        if share % size == 0 and _is_whole(sources, size, group):
            return size
    raise ConfigError(
        f"{name} is quantised in groups of {group} inputs, which are cut where the model is padded and split into "
        f"{padded.shards} parts: no group of {', '.join(map(str, GROUPS))} inputs has one scale (tp, max_tp)"
    )


def stored_inputs(name: str, size: int, config: ModelConfig) -> int:
    """Return the inputs of a weight as it is stored, which has `size` inputs when it is padded."""
    if name not in SPLIT_INPUTS:
        return size
    return config.num_heads * config.head_dim if name == "attention.o" else _inner(name, config)


def _is_whole(sources: np.ndarray, size: int, group: int) -> bool:
    """Return whether the inputs in each group of `size` come from one group only."""
    groups = np.where(sources < 0, -1, sources // group).reshape(-1, size)
    first = groups.max(axis=-1, keepdims=True)
    return bool(np.all((groups == first) | (groups < 0)))


@cache
def _inputs(name: str, config: ModelConfig, padded: ModelConfig) -> np.ndarray:
    """Return the stored input for each input of a padded weight; -1 for one that was added."""
    if name == "attention.o":
        query, _ = head_sources(config, padded)
        heads = query.reshape(-1, 1)
        return np.where(heads < 0, -1, heads * config.head_dim + np.arange(config.head_dim)).ravel()
    size, padded_size = (_inner(name, model) for model in (config, padded))
    inputs = np.arange(padded_size)
    return np.where(inputs < size, inputs, -1)


def _inner(name: str, config: ModelConfig) -> int:
    """Return the inner size of a dense feed-forward or of an expert."""
    return config.moe.intermediate_size if "experts" in name and config.moe else config.intermediate_size


def _fit_inputs(name: str, leaf: QArray, config: ModelConfig, padded: ModelConfig) -> QArray:
    """Return a weight with its inputs in their padded places."""
    sources, group = _inputs(name, config, padded), group_after(name, leaf.group, config, padded)
    moved = not np.array_equal(sources, np.arange(leaf.size))
    if not moved and group == leaf.group:
        return leaf
    # An input that was not added says which scale its group has.
    grouped = sources.reshape(-1, group)
    some = grouped.max(axis=-1)
    of_groups = np.where(some < 0, 0, some // leaf.group)

    def spread(values: np.ndarray) -> np.ndarray:
        return np.where(some < 0, np.zeros((), values.dtype), values[..., of_groups])

    scales = spread(np.asarray(leaf.scales))
    zeros = None if leaf.zeros is None else spread(np.asarray(leaf.zeros))
    codes = np.asarray(leaf.codes)
    if moved:
        middle = 1 << (leaf.bits - 1)
        zero = np.zeros(scales.shape, np.float32) if zeros is None else zeros.astype(np.float32)
        added = np.repeat(np.rint(zero).astype(np.int16) + middle, group, axis=-1).astype(np.uint8)
        codes = pack(np.where(sources < 0, added, unpack(codes, leaf.bits, leaf.size)[..., sources]), leaf.bits)
    return QArray(codes, scales, zeros, leaf.bits, len(sources))


def _fit_outputs(name: str, array: np.ndarray, config: ModelConfig, padded: ModelConfig) -> np.ndarray:
    """Return an array with its outputs in their padded places; those that were added are zeros."""
    if name in ("attention.qkv", "attention.qkv_bias"):
        if (config.num_heads, config.num_kv_heads) == (padded.num_heads, padded.num_kv_heads):
            return array
        q, k, v = array[:, :-2], array[:, -2], array[:, -1]
        flat = (x.reshape(-1, *array.shape[3:]) for x in (q, k, v))
        return pack_qkv(*flat, config, padded, array.dtype)
    inner = _inner(name, padded)
    if padded.shards == 1 and inner == _inner(name, config):
        return array
    if name in ("mlp.gate_up", "mlp.gate_up_bias"):
        return pack_gate_up(array[0], inner, padded.shards, array.dtype)
    if name == "mlp.experts_gate_up":
        return np.stack([pack_gate_up(expert[0], inner, padded.shards, array.dtype) for expert in array])
    return array
