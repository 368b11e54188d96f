"""Rounding of a weight to the nearest, with a search of each group's scale for the least error.

The scale that maps the largest magnitude to the end of the codes is seldom the best one: with a smaller range one
number is cut off, and all others are closer. The search tries scales of several sizes, and symmetric ones with both
signs, because codes reach one further below 0 than above.

The error of a group is the sum of squared errors, in which large numbers v count more: h = sqrt(1 + v^2 / mean(v^2))
times. In 3 bits, equal weights cost a real model 0.2 nats a token more, and so do weights of v^2.

For given codes q the best scale is sum(h v q) / sum(h q q), which lowers the error by sum(h v q)^2 / sum(h q q). So one
pass over a group rates a scale. The best one is rounded to bfloat16 and fitted once more to its codes. It is used if
its error is less than that of plain rounding (`rounding.quantize`).

This is the definition of kernels/native/rounding.cc, which gives the same codes, scales and zeros: every operation is
one of IEEE's, and the numbers of a group are added in their order.
"""

from collections.abc import Iterator

import numpy as np

from jaxserve.core.scale_groups import GROUP, group_size
from jaxserve.quantization.qarray import QArray
from jaxserve.quantization.rounding import codes_of, ends, in_groups, packed, plain_grid, stored_scale

# The tried scales of symmetric codes, as shares of the plain one, each with both signs. Larger ones may have less
# error, but round most numbers of a group to 0, which cost a real model more than it gained.
SHARES = np.float32((1, 1.05, 1.1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6))
# The tried ranges of asymmetric codes, as shares of the range of the values.
SHRINKS = np.float32([1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6])
# The largest magnitudes of groups that are searched. Beyond them squares may be 0 or infinite.
LEAST, MOST = np.float32(2.0**-40), np.float32(2.0**40)

Array = np.ndarray
Grid = tuple[Array, Array]
"""The scale and the zero of each group, float32 [groups]."""


def quantize_by_search(w: Array, bits: int, *, group: int = GROUP, symmetric: bool = True) -> QArray:
    """Return a weight w [out..., C], whose values are finite, as a QArray with searched scales.

    `group` is `wanted` of `group_size`. Weights of 8 bits are rounded plainly: a search would gain next to nothing.
    Raise `ConfigError` for other bits than 8, 4 or 3.
    """
    x = in_groups(w, bits, group_size(w.shape[-1], group))
    with np.errstate(all="ignore"):  # in groups that are not searched
        grid = plain_grid(x, bits, symmetric)
        if bits < 8:
            h = importance(x)
            grid = _better(x, h, grid, _search(x, h, grid, bits, symmetric), bits)
        return packed(w.shape, codes_of(x, *grid, bits), grid[0], None if symmetric else grid[1], bits)


def importance(x: Array) -> Array:
    """Return how often the squared error of each number of x [group, groups] counts."""
    squares = x * x
    return np.sqrt(1 + squares / (squares.sum(axis=0) / np.float32(len(x))))


def _search(x: Array, h: Array, plain: Grid, bits: int, symmetric: bool) -> Grid:
    """Return the best of the grids that are tried, for each group of x [group, groups] with importances h."""
    gain, best = np.full(x.shape[1], -1, np.float32), plain
    for factor, zero in _symmetric_tries(x, bits) if symmetric else _asymmetric_tries(x, bits):
        ab, bb = _fit(x, h, np.rint(np.clip(x * factor + zero, *ends(bits))) - zero)
        gained = ab * ab / bb
        best = _where(gained > gain, (ab / bb, zero), best)
        gain = np.where(gained > gain, gained, gain)
    return best


def _symmetric_tries(x: Array, bits: int) -> Iterator[Grid]:
    """Yield factors from numbers to codes, and zeros."""
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], 0)[0]
    for sign in np.float32((1, -1)):
        for share in SHARES:
            yield sign * np.float32(ends(bits)[0]) / share / extreme, np.zeros_like(extreme)


def _asymmetric_tries(x: Array, bits: int) -> Iterator[Grid]:
    """Yield factors from numbers to codes, and the zeros next to the one that centres the range."""
    low, high = ends(bits)
    least, most = np.minimum(x.min(axis=0), 0), np.maximum(x.max(axis=0), 0)
    half = (most - least) * np.float32(0.5)
    middle = least + half
    for shrink in SHRINKS:
        scale = half * shrink / np.float32(high - low) * np.float32(2)
        below = np.floor(np.float32(low) - (middle - half * shrink) / scale)
        for more in (0, 1):
            yield np.float32(1) / scale, np.clip(below + np.float32(more), low, high)


def _better(x: Array, h: Array, plain: Grid, found: Grid, bits: int) -> Grid:
    """Return the plain grid or the found one, whichever has the lower error. The found scale is fitted once more."""
    largest = np.abs(x).max(axis=0)
    searched, best, error = (largest >= LEAST) & (largest <= MOST), plain, _error(x, h, plain, bits)[0]
    for _ in range(2):
        found = stored_scale(found[0]), found[1]
        other, (ab, bb) = _error(x, h, found, bits)
        better = searched & (other < error)
        best, error = _where(better, found, best), np.where(better, other, error)
        found = ab / bb, found[1]
    return best


def _error(x: Array, h: Array, grid: Grid, bits: int) -> tuple[Array, tuple[Array, Array]]:
    """Return the errors by group, and the fit of the codes."""
    steps = codes_of(x, *grid, bits) - grid[1]
    off = x - steps * grid[0]
    return (off * off * h).sum(axis=0), _fit(x, h, steps)


def _fit(x: Array, h: Array, steps: Array) -> tuple[Array, Array]:
    """Return sum(h x q) and sum(h q^2) for the multiples q of the scale, by group."""
    weighted = h * steps
    return (weighted * x).sum(axis=0), (weighted * steps).sum(axis=0)


def _where(condition: Array, a: Grid, b: Grid) -> Grid:
    return np.where(condition, a[0], b[0]), np.where(condition, a[1], b[1])
