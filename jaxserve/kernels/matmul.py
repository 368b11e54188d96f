"""Multiplication by a weight: the one place where models spend their time."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.kernels.gpu import Choice, device_kind, uses_pallas
from jaxserve.kernels.native import matmul as native
from jaxserve.quantization import QArray

MIN_CPU_ROWS = 4  # XLA's CPU backend multiplies fewer rows of 16-bit numbers ten times slower


def matmul(
    x: jax.Array,
    w: jax.Array | QArray,
    *,
    contract: int = 1,
    dtype: jnp.dtype | None = None,
    split: bool = False,
    gpu: Choice = "auto",
) -> jax.Array:
    """Contracts the last `contract` axes of x [rows..., c...] and w [out..., c...], giving [rows..., out...].

    `split`: the operands are split over devices, and XLA must be able to partition the product. `gpu` says what runs
    on a GPU (`kernels.gpu.Choice`).

    A QArray is contracted over all its inputs, [out..., C] with C = c0 * c1 ...

    Sums in float32 whatever the operands are; the result has `dtype`, by default that of `x`. Both operands are seen
    as matrices, because XLA's CPU backend transposes weights of higher rank on every call. A leading sharded axis of
    `w` survives this view, so weights keep the axis that is split over devices first among the output axes and first
    among the contracted ones.
    """
    if isinstance(w, QArray) and not split and uses_pallas(gpu):
        return _quantized_on_gpu(x, w, contract, dtype)
    if isinstance(w, QArray):
        w = w.dequantize(x.dtype).reshape(*w.shape[:-1], *x.shape[-contract:])
    if x.shape[-contract:] != w.shape[-contract:]:
        raise ValueError(f"cannot contract the last {contract} axes of {x.shape} and {w.shape}")
    rows, out, inner = x.shape[:-contract], w.shape[:-contract], math.prod(w.shape[-contract:])
    x, w = x.reshape(math.prod(rows), inner), w.reshape(math.prod(out), inner)
    y = _dot(x, w) if split or len(x) > native.MAX_ROWS else _dot_few_rows(x, w)
    return y.astype(dtype or x.dtype).reshape(*rows, *out)


def _quantized_on_gpu(x: jax.Array, w: QArray, contract: int, dtype: jnp.dtype | None) -> jax.Array:
    """`matmul` with the Pallas kernel on CUDA, if it takes these shapes."""
    from pallas_kernels import blocks, quantized_matmul as pallas  # takes a while, and only GPUs need it

    rows = x.shape[:-contract]
    elsewhere = partial(matmul, contract=contract, dtype=dtype, gpu="xla")

    def on_cuda(x: jax.Array, w: QArray) -> jax.Array:
        matrix = x.reshape(math.prod(rows), w.size)
        y = pallas.quantized_matmul(matrix, w, blocks=blocks.blocks_for(device_kind()))
        return y.astype(dtype or x.dtype).reshape(*rows, *w.shape[:-1])

    if not pallas.supports(math.prod(rows), x.dtype, w):
        return elsewhere(x, w)
    return lax.platform_dependent(x, w, cuda=on_cuda, default=elsewhere)


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _dot_few_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    """The product where reading the weight is all of the work."""

    def padded(x: jax.Array, w: jax.Array) -> jax.Array:
        return _dot(jnp.pad(x, ((0, MIN_CPU_ROWS - len(x)), (0, 0))), w)[: len(x)]

    if native.supports(x, w):
        on_cpu = native.matmul
    elif len(x) < MIN_CPU_ROWS and w.dtype.itemsize == 2:
        on_cpu = padded
    else:
        return _dot(x, w)
    return lax.platform_dependent(x, w, cpu=on_cpu, default=_dot)
