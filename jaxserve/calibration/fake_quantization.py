"""Rounding in JAX, as `rounding.quantize` does it or with searched scales. `bits` may be traced, to compile once.

Axes: O outputs, C inputs, G groups of inputs that share a scale.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float

from jaxserve.quantization.packing import pack
from jaxserve.quantization.qarray import QArray
from jaxserve.quantization.rounding import group_size

# Shares of a group's range that are tried in place of the whole. Symmetric codes reach one further below zero than
# above, so that a negative share, which swaps the ends, may fit better.
SHARES = (1.0, 1.1, 0.92, 0.84, 0.76, 0.66)
SWAPPED = (-1.05, -0.9)

Bits = int | Array


class Grid(NamedTuple):
    """The scale and the zero point of each group, as bfloat16 holds them. Symmetric zero points are 0."""

    scales: Float[Array, "*G"]
    zeros: Float[Array, "*G"]


def grouped(w: Float[Array, "*O C"], group: int) -> Float[Array, "*O G group"]:
    """Split the inputs into groups of the size that `quantize` uses.

    That is the size nearest to `group` that divides the inputs. 0 stands for one group of all inputs.
    """
    size = w.shape[-1]
    group = size if group == 0 else group_size(size, group)
    return w.reshape(*w.shape[:-1], size // group, group)


def plain_grid(groups: Float[Array, "*G group"], bits: Bits, symmetric: bool) -> Grid:
    """Return the grid of `quantize`."""
    low, high = _ends(bits)
    least, most = groups.min(-1), groups.max(-1)
    if symmetric:
        extreme = jnp.where(most >= -least, most, least)
        scales = jnp.where(bits == 8, jnp.abs(extreme) / high, extreme / low)
        return Grid(_stored(scales), jnp.zeros_like(scales))
    least, most = jnp.minimum(least, 0), jnp.maximum(most, 0)
    scales = _stored((most - least) / (high - low))
    return Grid(scales, _bfloat16(jnp.clip(jnp.rint(-least / scales) + low, low, high)))


def searched_grid(
    groups: Float[Array, "*O G group"], weights: Float[Array, "G group"], bits: Bits, symmetric: bool
) -> Grid:
    """Return the grid of each group with the least squared error, in which every input has a weight.

    As in rounding without text (`scale_search.importance`), errors of large numbers count more. Several shares of the
    plain range are tried. For the codes of each, the scale that fits best has a closed form.
    """
    plain = plain_grid(groups, bits, symmetric)
    squares = jnp.square(groups)
    mean = squares.mean(-1, keepdims=True)
    weights = weights * jnp.sqrt(1 + squares / jnp.where(mean > 0, mean, 1))

    def better(best: tuple[Array, Array], share: Array) -> tuple[tuple[Array, Array], None]:
        scales = _refitted(groups, weights, Grid(_stored(plain.scales * share), plain.zeros), bits)
        error = _error(groups, weights, Grid(scales, plain.zeros), bits)
        wins = error < best[1]
        return (jnp.where(wins, scales, best[0]), jnp.where(wins, error, best[1])), None

    shares = jnp.array(SHARES + (SWAPPED if symmetric else ()))
    (scales, _), _ = jax.lax.scan(better, (plain.scales, _error(groups, weights, plain, bits)), shares)
    return Grid(scales, plain.zeros)


def codes(x: Array, scales: Array, zeros: Array, bits: Bits) -> Array:
    """Return the nearest signed codes as floats. The arguments are broadcast against each other."""
    return jnp.clip(jnp.rint(x / scales + zeros), *_ends(bits))


def rounded(groups: Float[Array, "*G group"], bits: Bits, symmetric: bool) -> Float[Array, "*G group"]:
    """Return the weights after plain quantisation and dequantisation."""
    return _on(groups, plain_grid(groups, bits, symmetric), bits)


def as_qarray(shape: tuple[int, ...], signed: np.ndarray, grid: Grid, bits: int, *, symmetric: bool) -> QArray:
    """Return the QArray of a weight's shape [out..., C] with signed codes, as `codes` returns them."""
    unsigned = (np.asarray(signed) + (1 << (bits - 1))).astype(np.uint8).reshape(shape)
    scales, zeros = (np.asarray(x).astype(ml_dtypes.bfloat16).reshape(*shape[:-1], -1) for x in grid)
    return QArray(pack(unsigned, bits), scales, None if symmetric else zeros, bits, shape[-1])


def _ends(bits: Bits) -> tuple[Bits, Bits]:
    half = 1 << (bits - 1)
    return -half, half - 1


def _on(groups: Array, grid: Grid, bits: Bits) -> Array:
    """Return the numbers of a grid that are nearest to the weights."""
    scales, zeros = (x[..., None] for x in grid)
    return (codes(groups, scales, zeros, bits) - zeros) * scales


def _error(groups: Array, weights: Array, grid: Grid, bits: Bits) -> Array:
    return (weights * jnp.square(_on(groups, grid, bits) - groups)).sum(-1)


def _refitted(groups: Array, weights: Array, grid: Grid, bits: Bits) -> Array:
    """Return the scales that fit a grid's codes best."""
    steps = codes(groups, grid.scales[..., None], grid.zeros[..., None], bits) - grid.zeros[..., None]
    square = (weights * jnp.square(steps)).sum(-1)
    best = (weights * groups * steps).sum(-1) / jnp.where(square > 0, square, 1)
    return _stored(jnp.where(square > 0, best, grid.scales))


def _stored(scales: Array) -> Array:
    scales = _bfloat16(scales)
    return jnp.where(scales == 0, 1, scales)


def _bfloat16(x: Array) -> Array:
    """Round float32 to numbers that bfloat16 holds. XLA may optimise away a cast to bfloat16 and back."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
