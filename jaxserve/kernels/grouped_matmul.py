"""Multiplication of groups of rows, each by its own weight, for mixtures of experts."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.core.config import KernelBackend
from jaxserve.core.numeric import ceil_div
from jaxserve.kernels.matmul import matmul
from jaxserve.quantization import QArray

_ROWS_BY_GROUP = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
MIN_BLOCK, MAX_BLOCK = 8, 128  # rows multiplied at once on CPU


def grouped_matmul(
    x: jax.Array,
    w: jax.Array | QArray,
    group_sizes: jax.Array,
    *,
    backend: KernelBackend = "auto",
) -> jax.Array:
    """Multiply x [R, c], whose rows are sorted by group, by the weights w [X, out..., c], giving [R, out...].

    group_sizes int32 [X] sums to R. Sums are in float32; the result has the dtype of `x`. `backend` limits the
    implementations.
    """
    by_blocks = partial(_by_blocks, backend=backend)
    if isinstance(w, QArray):
        y = by_blocks(x, w, group_sizes)
    else:
        flat = w.reshape(len(w), -1, w.shape[-1])
        y = lax.platform_dependent(x, flat, group_sizes, cpu=by_blocks, default=_ragged)
    return y.astype(x.dtype).reshape(len(x), *w.shape[1:-1])


def _ragged(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot_general(x, w, group_sizes, _ROWS_BY_GROUP, preferred_element_type=jnp.float32)


def _by_blocks(x: jax.Array, w: jax.Array | QArray, group_sizes: jax.Array, *, backend: KernelBackend) -> jax.Array:
    """Multiply each group in blocks of rows, because XLA's ragged_dot on CPU multiplies all rows by all weights.

    A group's last block extends into the rows of the next group, which is computed later and overwrites them. The
    barrier keeps XLA from widening all weights to float32 before the loop. The sums stay float32 in the loop, because
    XLA widens a complete 16-bit array to update a slice of it.
    """
    rows, groups, out = len(x), w.shape[0], math.prod(w.shape[1:-1])
    block = min(max(_power_of_two(rows // groups), MIN_BLOCK), MAX_BLOCK)
    blocks = ceil_div(group_sizes, block)
    ends = jnp.cumsum(blocks)
    index = jnp.arange(min(groups, rows) + rows // block, dtype=jnp.int32)
    group = jnp.searchsorted(ends, index, side="right").clip(max=groups - 1)
    starts = (jnp.cumsum(group_sizes) - group_sizes)[group] + (index - (ends - blocks)[group]) * block
    padded = jnp.pad(x, ((0, block), (0, 0)))

    def step(i: jax.Array, y: jax.Array) -> jax.Array:
        weights, i = lax.optimization_barrier((w, i))
        weight = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, group[i], keepdims=False), weights)
        some = lax.dynamic_slice_in_dim(padded, starts[i], block)
        if isinstance(weight, QArray):
            part = matmul(some, weight, dtype=jnp.float32, backend=backend).reshape(block, out)
        else:
            part = lax.dot_general(some, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return lax.dynamic_update_slice_in_dim(y, part, starts[i], 0)

    y = lax.fori_loop(0, ends[-1], step, jnp.zeros((rows + block, out), jnp.float32))
    return y[:rows]


def _power_of_two(n: int) -> int:
    return 2 ** math.ceil(math.log2(max(n, 1)))
