"""Parameters that are quantised: what a QArray in place of a weight looks like."""

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
    """A symmetric QArray [out..., size] of uniformly random codes; `parts` as in `group_of`."""
    codes = jax.random.bits(key, (*out, packed_bytes(bits, size)), jnp.uint8)
    scale = stddev * math.sqrt(12) / (1 << bits)
    scales = jnp.full((*out, size // group_of(size, bits, parts)), scale, jnp.bfloat16)
    return QArray(codes, scales, None, bits, size)


def split_unit(precisions: Iterable[str]) -> int:
    """What a device's share of the inputs of a weight should be a multiple of, to be split in all these precisions."""
    bits = {BITS[precision] for precision in precisions if precision in BITS}
    return math.lcm(*(math.lcm(GROUP, UNIT[b]) for b in bits))


def group_of(size: int, bits: int, parts: int) -> int:
    """How many inputs share a scale in a weight with `size` inputs that are split into `parts` equal shares.

    Raises `ConfigError` where a share is no whole number of groups and of packed units.
    """
    if parts == 1:
        return group_size(size)
    share = size // parts
    group = next((group for group in GROUPS if share % group == 0), None)
    if group is None or share % UNIT[bits]:
        raise ConfigError(
            f"a weight of {size} inputs cannot be split over {parts} devices in int{bits}: a share of {share} inputs "
            f"is no multiple of {math.lcm(UNIT[bits], GROUPS[-1])} (tp, precision, variants)"
        )
    return group
