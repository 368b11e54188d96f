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
from jaxserve.kernels.rows import Rows, as_matrix, value_of
from jaxserve.quantization import QArray

Total = Callable[[jax.Array], jax.Array]
"""The sum over devices of what each has: float32 [R, N] -> [R, N]."""

MIN_CPU_ROWS = 4  # XLA's CPU backend multiplies fewer rows of 16-bit numbers ten times slower


def matmul(
    x: Rows,
    w: jax.Array | QArray,
    *,
    contract: int = 1,
    dtype: jnp.dtype | None = None,
    total: Total | None = None,
    backend: KernelBackend = "auto",
) -> jax.Array:
    """Contracts the last `contract` axes of x [rows..., c...] and w [out..., c...], giving [rows..., out...].

    `total`: x and w are one device's parts of the contracted axes, and this adds up what the devices have of the
    product, in float32. `backend` says what may run it.

    A QArray is contracted over all its inputs, [out..., C] with C = c0 * c1 ... Rows that are still to be normalised or
    gated are computed on their way in by kernels that can.

    Sums in float32 whatever the operands are; the result has `dtype`, by default that of `x`. Both operands are seen
    as matrices, because XLA's CPU backend transposes weights of higher rank on every call. A leading sharded axis of
    `w` survives this view, so weights keep the axis that is split over devices first among the output axes and first
    among the contracted ones.
    """
    rows, inner = x.shape[:-contract], x.shape[-contract:]
    out = w.shape[:-1] if isinstance(w, QArray) else w.shape[:-contract]
    if w.shape[len(out) :] != ((math.prod(inner),) if isinstance(w, QArray) else inner):
        raise ValueError(f"cannot contract the last {contract} axes of {x.shape} and {w.shape}")
    w = _as_matrix(w, len(out))
    dtype = jnp.dtype(dtype or x.dtype)
    y = _product(as_matrix(x, math.prod(rows)), w, jnp.dtype(jnp.float32) if total else dtype, backend)
    if total is not None:
        y = total(y).astype(dtype)
    return y.reshape(*rows, *out)


def _as_matrix(w: jax.Array | QArray, axes: int) -> jax.Array | QArray:
    """The weight, or each leaf of it, with its first `axes` axes as one and the others as another."""
    return jax.tree.map(lambda leaf: leaf.reshape(math.prod(leaf.shape[:axes]), math.prod(leaf.shape[axes:])), w)


def _product(x: Rows, w: jax.Array | QArray, dtype: jnp.dtype, backend: KernelBackend) -> jax.Array:
    """x [R, c] times w [N, c], by the platform's best means."""
    best: dict[str, Callable[..., jax.Array]] = {}
    if uses_native(backend) and native.supports(x, w):
        best["cpu"] = partial(native.matmul, dtype=dtype)
    elif x.shape[0] < MIN_CPU_ROWS and x.dtype.itemsize == 2:
        best["cpu"] = partial(_dot_padded, dtype=dtype)
    if isinstance(w, QArray) and uses_pallas(backend):
        from pallas_kernels import blocks, quantized_matmul as pallas  # takes a while, and only GPUs need it

        def on_cuda(x: Rows, w: QArray) -> jax.Array:
            return pallas.quantized_matmul(value_of(x), w, blocks=blocks.blocks_for(device_kind())).astype(dtype)

        if pallas.supports(x.shape[0], x.dtype, w):
            best["cuda"] = on_cuda
    plain = partial(_dot, dtype=dtype)
    return lax.platform_dependent(x, w, **best, default=plain) if best else plain(x, w)


def _dot(x: Rows, w: jax.Array | QArray, *, dtype: jnp.dtype) -> jax.Array:
    x = value_of(x)
    if isinstance(w, QArray):
        w = w.dequantize(x.dtype)
    y = lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y.astype(dtype)


def _dot_padded(x: Rows, w: jax.Array | QArray, *, dtype: jnp.dtype) -> jax.Array:
    x = value_of(x)
    return _dot(jnp.pad(x, ((0, MIN_CPU_ROWS - len(x)), (0, 0))), w, dtype=dtype)[: len(x)]
