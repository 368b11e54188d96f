"""The product of a few rows with a bfloat16 weight as a custom call; matmul.cc is the kernel."""

import jax
import jax.numpy as jnp

from jaxserve.kernels.native.library import MATMUL, targets

MAX_ROWS = 32  # beyond, XLA's own product is as fast: it rearranges the weight, which pays off by then
MIN_OUT, INNER_MULTIPLE = 32, 32  # of the matrix unit's tiles


def supports(x: jax.Array, w: jax.Array) -> bool:
    """Whether the kernel is there, and made for such operands."""
    fits = x.shape[0] <= MAX_ROWS and w.shape[0] >= MIN_OUT and w.shape[1] % INNER_MULTIPLE == 0
    return fits and x.dtype == w.dtype == jnp.bfloat16 and MATMUL in targets()


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """x bf16 [R, c] times w bf16 [N, c], both read as they lie: float32 [R, N]."""
    return jax.ffi.ffi_call(MATMUL, jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32))(x, w)
