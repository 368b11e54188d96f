"""Multiplication by a weight, on which models spend most of their time."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.core.config import KernelBackend
from jaxserve.core.dequantization import outputs_by_tile
from jaxserve.core.numeric import ceil_div
from jaxserve.kernels.backend import device_kind, runs_on_gpu, uses_native, uses_pallas
from jaxserve.kernels.native import matmul as native
from jaxserve.kernels.operands import LeftOperand, as_matrix, value_of
from jaxserve.quantization import QArray

AllReduce = Callable[[jax.Array], jax.Array]
"""A function that sums the partial results of all devices: float32 [R, N] -> [R, N]."""

# XLA's CPU backend multiplies fewer rows of 16-bit numbers ten times slower.
MIN_CPU_ROWS = 4


def matmul(
    x: LeftOperand,
    w: jax.Array | QArray,
    *,
    contract: int = 1,
    dtype: jnp.dtype | None = None,
    all_reduce: AllReduce | None = None,
    residual: jax.Array | None = None,
    backend: KernelBackend = "auto",
) -> jax.Array:
    """Contract the last `contract` axes of x [rows..., c...] and w [out..., c...], giving [rows..., out...].

    If x and w are one device's parts of the contracted axes, `all_reduce` sums the devices' products in float32.
    `residual` [rows..., out...] is added to the result. `backend` limits the implementations.

    A QArray is contracted over all its inputs, [out..., C] with C = c0 * c1 ... Kernels that can do so compute deferred
    norms and activations of x while they read it.

    Sums are in float32 for all dtypes. The result and `residual` have `dtype`, by default that of `x`. Both operands
    are reshaped to matrices, because XLA's CPU backend transposes weights of higher rank on every call. The sharding of
    a leading axis of `w` survives the reshape, so weights have the axis that is split over devices first among the
    output axes and first among the contracted axes.

    Raise `ValueError` if the contracted axes differ.
    """
    rows, inner = x.shape[:-contract], x.shape[-contract:]
    out = w.shape[:-1] if isinstance(w, QArray) else w.shape[:-contract]
    if w.shape[len(out) :] != ((math.prod(inner),) if isinstance(w, QArray) else inner):
        raise ValueError(f"cannot contract the last {contract} axes of {x.shape} and {w.shape}")
    w = _as_matrix(w, len(out))
    x, dtype = as_matrix(x, math.prod(rows)), jnp.dtype(dtype or x.dtype)
    if residual is not None:
        residual = residual.reshape(math.prod(rows), -1)
    if all_reduce is None:
        y = _product(x, w, residual, dtype, backend)
    else:
        y = _plus(all_reduce(_product(x, w, None, jnp.dtype(jnp.float32), backend)).astype(dtype), residual)
    return y.reshape(*rows, *out)


def _as_matrix(w: jax.Array | QArray, axes: int) -> jax.Array | QArray:
    """Reshape a weight, or each leaf of a QArray, to its first `axes` axes by all others."""
    return jax.tree.map(lambda leaf: leaf.reshape(math.prod(leaf.shape[:axes]), math.prod(leaf.shape[axes:])), w)


def _plus(y: jax.Array, residual: jax.Array | None) -> jax.Array:
    return y if residual is None else y + residual


def _product(
    x: LeftOperand, w: jax.Array | QArray, residual: jax.Array | None, dtype: jnp.dtype, backend: KernelBackend
) -> jax.Array:
    """Return x [R, c] times w [N, c] plus a residual [R, N] if given, by the platform's fastest implementation."""
    best: dict[str, Callable[..., jax.Array]] = {}
    if uses_native(backend) and native.supports(x, w):
        best["cpu"] = partial(native.matmul, dtype=dtype)
    elif x.shape[0] < MIN_CPU_ROWS and x.dtype.itemsize == 2:
        best["cpu"] = partial(_dot_padded, dtype=dtype)
    if isinstance(w, QArray) and uses_pallas(backend):
        from pallas_kernels import blocks, quantized_matmul as pallas  # slow to import, and only GPUs need it

        def on_cuda(x: LeftOperand, w: QArray, residual: jax.Array | None) -> jax.Array:
            y = pallas.quantized_matmul(value_of(x), w, blocks=blocks.blocks_for(device_kind()))
            return _plus(y.astype(dtype), residual)

        if pallas.supports(x.shape[0], x.dtype, w):
            best["cuda"] = on_cuda
    plain = partial(_dot, dtype=dtype)
    return lax.platform_dependent(x, w, residual, **best, default=plain) if best else plain(x, w, residual)


def _dot(x: LeftOperand, w: jax.Array | QArray, residual: jax.Array | None, *, dtype: jnp.dtype) -> jax.Array:
    x = value_of(x)
    y = _dequantized_dot(x, w, dtype) if isinstance(w, QArray) else _plain_dot(x, w, dtype)
    return _plus(y, residual)


def _plain_dot(x: jax.Array, w: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return x [R, c] times w [N, c], summed in float32 and then rounded.

    Products on a GPU round the sums that they hold in registers. Asked for float32, they would write twice the bytes,
    and another kernel would read and round them. XLA's CPU backend would sum in 16 bits.
    """
    summed = dtype if x.dtype == dtype and runs_on_gpu() else jnp.float32
    y = lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=summed)
    return y.astype(dtype)


def _dequantized_dot(x: jax.Array, w: QArray, dtype: jnp.dtype) -> jax.Array:
    """Return x [R, C] times the dequantised w [N, C], of which a tile of outputs exists at a time.

    The loop bounds XLA's temporaries: without it XLA dequantises all tiles before it multiplies, on CPU even across
    `optimization_barrier`. The last tile begins earlier if it would be shorter, and computes some outputs again.
    """
    (outputs, inputs), rows = w.shape, len(x)
    tile = outputs_by_tile(outputs, inputs, x.dtype.itemsize)
    if tile == outputs:
        return _plain_dot(x, w.dequantize(x.dtype), dtype)

    def step(index: jax.Array, y: jax.Array) -> jax.Array:
        first = jnp.minimum(index * tile, outputs - tile)
        part = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, first, tile), w)
        return lax.dynamic_update_slice_in_dim(y, _plain_dot(x, part.dequantize(x.dtype), dtype), first, axis=1)

    return lax.fori_loop(0, ceil_div(outputs, tile), step, jnp.zeros((rows, outputs), dtype))


def _dot_padded(x: LeftOperand, w: jax.Array | QArray, residual: jax.Array | None, *, dtype: jnp.dtype) -> jax.Array:
    x = value_of(x)
    y = _dot(jnp.pad(x, ((0, MIN_CPU_ROWS - len(x)), (0, 0))), w, None, dtype=dtype)[: len(x)]
    return _plus(y, residual)
