"""Shapes and group sizes of quantised parameters."""

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jaxserve.core.errors import ConfigError
from jaxserve.core.precision import BITS
from jaxserve.quantization import QArray
from jaxserve.quantization.packing import UNIT, packed_bytes
from jaxserve.quantization.rounding import GROUP, GROUPS, group_size


def random_qarray(key: jax.Array, out: tuple[int, ...], size: int, bits: int, parts: int, stddev: float) -> QArray:
    """Return a symmetric QArray [out..., size] of uniformly random codes.

    Its inputs can be split into `parts` equal shares. Raise `ConfigError` as `group_of` does.
    """
    codes = jax.random.bits(key, (*out, packed_bytes(bits, size)), jnp.uint8)
    scale = stddev * math.sqrt(12) / (1 << bits)
    scales = jnp.full((*out, size // group_of(size, bits, parts)), scale, jnp.bfloat16)
    return QArray(codes, scales, None, bits, size)


def split_unit(precisions: Iterable[str]) -> int:
    """Return the unit of a device's share of a weight's inputs, which divides the share in all these precisions."""
    bits = {BITS[precision] for precision in precisions if precision in BITS}
    return math.lcm(*(math.lcm(GROUP, UNIT[b]) for b in bits))


def group_of(size: int, bits: int, parts: int) -> int:
    """Return the number of inputs that share a scale, for a weight whose `size` inputs are split into `parts` shares.

    Raise `ConfigError` if a share is not a whole number of groups and of packed units.
    """
    if parts == 1:
        return group_size(size)
    share = size // parts
    group = next((group for group in GROUPS if share % group == 0), None)
    if group is None or share % UNIT[bits]:
        raise ConfigError(
            f"a weight of {size} inputs cannot be split over {parts} devices in int{bits}: a share of {share} inputs "
            f"is not a multiple of {math.lcm(UNIT[bits], GROUPS[-1])} (tp, precision, variants)"
        )
    return group
