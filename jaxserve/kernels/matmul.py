"""Multiplication by a weight: the one place where models spend their time."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.core.config import KernelBackend
from jaxserve.kernels.backend import device_kind, uses_native, uses_pallas
from jaxserve.kernels.native import matmul as native
from jaxserve.kernels.operands import LeftOperand, as_matrix, value_of
from jaxserve.quantization import QArray

AllReduce = Callable[[jax.Array], jax.Array]
"""The sum over devices of what each has: float32 [R, N] -> [R, N]."""

MIN_CPU_ROWS = 4  # XLA's CPU backend multiplies fewer rows of 16-bit numbers ten times slower


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
    """Contracts the last `contract` axes of x [rows..., c...] and w [out..., c...], giving [rows..., out...].

    `all_reduce`: x and w are one device's parts of the contracted axes, and this adds up what the devices have of the
    product, in float32. `residual` [rows..., out...] is added to the result. `backend` says what may run it.

    A QArray is contracted over all its inputs, [out..., C] with C = c0 * c1 ... Rows that are still to be normalised or
    gated are computed on their way in by kernels that can.

    Sums in float32 whatever the operands are; the result has `dtype`, by default that of `x`, as has `residual`. Both
    operands are seen as matrices, because XLA's CPU backend transposes weights of higher rank on every call. A leading
    sharded axis of `w` survives this view, so weights keep the axis that is split over devices first among the output
    axes and first among the contracted ones.
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
    """The weight, or each leaf of it, with its first `axes` axes as one and the others as another."""
    return jax.tree.map(lambda leaf: leaf.reshape(math.prod(leaf.shape[:axes]), math.prod(leaf.shape[axes:])), w)


def _plus(y: jax.Array, residual: jax.Array | None) -> jax.Array:
    return y if residual is None else y + residual


def _product(
    x: LeftOperand, w: jax.Array | QArray, residual: jax.Array | None, dtype: jnp.dtype, backend: KernelBackend
) -> jax.Array:
    """x [R, c] times w [N, c], plus a residual [R, N] if there is one, by the platform's best means."""
    best: dict[str, Callable[..., jax.Array]] = {}
    if uses_native(backend) and native.supports(x, w):
        best["cpu"] = partial(native.matmul, dtype=dtype)
    elif x.shape[0] < MIN_CPU_ROWS and x.dtype.itemsize == 2:
        best["cpu"] = partial(_dot_padded, dtype=dtype)
    if isinstance(w, QArray) and uses_pallas(backend):
        from pallas_kernels import blocks, quantized_matmul as pallas  # takes a while, and only GPUs need it

        def on_cuda(x: LeftOperand, w: QArray, residual: jax.Array | None) -> jax.Array:
            y = pallas.quantized_matmul(value_of(x), w, blocks=blocks.blocks_for(device_kind()))
            return _plus(y.astype(dtype), residual)

        if pallas.supports(x.shape[0], x.dtype, w):
            best["cuda"] = on_cuda
    plain = partial(_dot, dtype=dtype)
    return lax.platform_dependent(x, w, residual, **best, default=plain) if best else plain(x, w, residual)


def _dot(x: LeftOperand, w: jax.Array | QArray, residual: jax.Array | None, *, dtype: jnp.dtype) -> jax.Array:
    x = value_of(x)
    if isinstance(w, QArray):
        w = w.dequantize(x.dtype)
    y = lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return _plus(y.astype(dtype), residual)


def _dot_padded(x: LeftOperand, w: jax.Array | QArray, residual: jax.Array | None, *, dtype: jnp.dtype) -> jax.Array:
    x = value_of(x)
    y = _dot(jnp.pad(x, ((0, MIN_CPU_ROWS - len(x)), (0, 0))), w, None, dtype=dtype)[: len(x)]
    return _plus(y, residual)
