"""`rounding.quantize` and what its result stands for, in JAX, for searches that try many times."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.quantization.rounding import group_size


def grouped(w: Float[Array, "*O C"], group: int) -> Float[Array, "*O groups group"]:
    """The inputs as groups of the size that `quantize` takes: the nearest to `group` that divides them; 0: all."""
    size = w.shape[-1]
    group = size if group == 0 else group_size(size, group)
    return w.reshape(*w.shape[:-1], size // group, group)


def scales_and_zeros(
    groups: Float[Array, "*G group"], bits: int, symmetric: bool
) -> tuple[Float[Array, "*G"], Float[Array, "*G"]]:
    """The scale and zero point of each group; the same numbers as `quantize`'s, zeros of 0 where symmetric."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    zero = jnp.zeros(groups.shape[:-1])
    if symmetric:
        extreme = jnp.take_along_axis(groups, jnp.abs(groups).argmax(-1, keepdims=True), -1)[..., 0]
        scales = jnp.maximum(jnp.abs(extreme) / high, jnp.abs(extreme) / -low) if bits == 8 else extreme / low
        return _stored(scales), zero
    least, most = jnp.minimum(groups.min(-1), 0), jnp.maximum(groups.max(-1), 0)
    scales = _stored((most - least) / (high - low))
    return scales, _bfloat16(jnp.clip(jnp.rint(-least / scales) + low, low, high))


def codes(x: Array, scales: Array, zeros: Array, bits: int) -> Array:
    """The nearest signed codes, as floats; everything broadcasts."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    return jnp.clip(jnp.rint(x / scales + zeros), low, high)


def rounded(groups: Float[Array, "*G group"], bits: int, symmetric: bool) -> Float[Array, "*G group"]:
    """What the quantised weights stand for."""
    scales, zeros = (x[..., None] for x in scales_and_zeros(groups, bits, symmetric))
    return (codes(groups, scales, zeros, bits) - zeros) * scales


def _stored(scales: Array) -> Array:
    scales = _bfloat16(scales)
    return jnp.where(scales == 0, 1, scales)


def _bfloat16(x: Array) -> Array:
    """float32 numbers that bfloat16 holds; a plain cast there and back may be optimised away."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
