"""Fake quantisation: quantises and dequantises as `rounding.quantize` does, but in JAX, for searches that try often."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.quantization.rounding import group_size


def grouped(w: Float[Array, "*O C"], group: int) -> Float[Array, "*O groups group"]:
    """Split the inputs into groups of the size that `quantize` uses.

    That is the size nearest to `group` that divides the inputs. 0 stands for one group of all inputs.
    """
    size = w.shape[-1]
    group = size if group == 0 else group_size(size, group)
    return w.reshape(*w.shape[:-1], size // group, group)


def scales_and_zeros(
    groups: Float[Array, "*G group"], bits: int, symmetric: bool
) -> tuple[Float[Array, "*G"], Float[Array, "*G"]]:
    """Return the scale and zero point of each group, equal to those of `quantize`. Symmetric zero points are 0."""
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
    """Return the nearest signed codes as floats. The arguments are broadcast against each other."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    return jnp.clip(jnp.rint(x / scales + zeros), low, high)


def rounded(groups: Float[Array, "*G group"], bits: int, symmetric: bool) -> Float[Array, "*G group"]:
    """Return the weights after quantisation and dequantisation."""
    scales, zeros = (x[..., None] for x in scales_and_zeros(groups, bits, symmetric))
    return (codes(groups, scales, zeros, bits) - zeros) * scales


def _stored(scales: Array) -> Array:
    scales = _bfloat16(scales)
    return jnp.where(scales == 0, 1, scales)


def _bfloat16(x: Array) -> Array:
    """Round float32 to numbers that bfloat16 holds. XLA may optimise away a cast to bfloat16 and back."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
