"""Shapes and group sizes of quantised parameters."""

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jaxserve.core.config import ModelConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.precision import BITS
from jaxserve.core.scale_groups import GROUP, GROUPS, default_group, group_size
from jaxserve.quantization import QArray
from jaxserve.quantization.packing import UNIT, packed_bytes


def random_qarray(
    key: jax.Array, out: tuple[int, ...], size: int, bits: int, parts: int, stddev: float, group: int = GROUP
) -> QArray:
    """Return a symmetric QArray [out..., size] of uniformly random codes.

    Its inputs can be split into `parts` equal shares. Raise `ConfigError` as `group_of` does.
    """
    codes = jax.random.bits(key, (*out, packed_bytes(bits, size)), jnp.uint8)
    scale = stddev * math.sqrt(12) / (1 << bits)
    scales = jnp.full((*out, size // group_of(size, bits, parts, group)), scale, jnp.bfloat16)
    return QArray(codes, scales, None, bits, size)


def wanted_group(config: ModelConfig, bits: int) -> int:
    """Return the group to take where it divides, for weights of 8, 4 or 3 bits of a model."""
    inner = config.moe.intermediate_size if config.moe else config.intermediate_size
    return default_group((config.hidden_size, config.num_heads * config.head_dim, inner), bits)


def split_unit(precisions: Iterable[str]) -> int:
    """Return the unit of a device's share of a weight's inputs, which divides the share in all these precisions."""
    bits = {BITS[precision] for precision in precisions if precision in BITS}
    return math.lcm(*(math.lcm(GROUP, UNIT[b]) for b in bits))


def group_of(size: int, bits: int, parts: int, wanted: int = GROUP) -> int:
    """Return the number of inputs that share a scale, for a weight whose `size` inputs are split into `parts` shares.

    It is `wanted` where that divides a share. Raise `ConfigError` if a share is not a whole number of groups and of
    packed units.
    """
    share = size // parts
    group = group_size(share, wanted)
    if parts > 1 and (group not in GROUPS or share % UNIT[bits]):
        raise ConfigError(
            f"a weight of {size} inputs cannot be split over {parts} devices in int{bits}: a share of {share} inputs "
            f"is not a multiple of {math.lcm(UNIT[bits], GROUPS[-1])} (tp, precision, variants)"
        )
    return group
