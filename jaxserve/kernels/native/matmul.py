"""Products with a weight as a custom call. The kernels are in matmul_*.cc."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxserve.kernels.native.library import MATMUL, multiplies_all, targets
from jaxserve.kernels.operands import DeferredNorm, DeferredSwiGLU, LeftOperand
from jaxserve.quantization import QArray

# Above it XLA's product with a bfloat16 weight is as fast, unless the variants of the machine are faster for all rows.
MAX_VECTOR_ROWS = 8
STEP = 32  # inputs that the kernels unpack at once
TINY = np.float32(1e-30)  # segments of smaller numbers become zeros
ROUND_X = ("amxint8", "vnni", "avx512bf16", "avx2few", "avx2")  # variants that round x to integers


def supports(x: LeftOperand, w: jax.Array | QArray) -> bool:
    """Return whether the kernels exist, support these operands, and are faster than XLA for them."""
    if MATMUL not in targets() or not x.shape[0] or not w.size:
        return False
    if isinstance(x, DeferredNorm) and x.weight.dtype != x.dtype:
        return False
    if isinstance(w, QArray):
        return x.dtype in (jnp.bfloat16, jnp.float32) and (w.group == w.size or w.group % STEP == 0)
    return x.dtype == w.dtype == jnp.bfloat16 and (multiplies_all() or x.shape[0] <= MAX_VECTOR_ROWS)


def matmul(
    x: LeftOperand,
    w: jax.Array | QArray,
    residual: jax.Array | None = None,
    *,
    dtype: DTypeLike = jnp.float32,
    variant: str = "",
) -> jax.Array:
    """Return x [R, c] times w [N, c] as [R, N] in `dtype`, which is bfloat16 or float32; sums are in float32.

    `residual` [R, N] has `dtype` too and is added to the rounded product. `variant` is one of `library.VARIANTS`, by
    default the fastest of this machine for the dtype of `x`. A variant that the machine lacks is an error when the step
    runs.

    The variant `amx` rounds the weights of a QArray to bfloat16, like `w.dequantize(bfloat16)`. The variants `ROUND_X`
    round a bfloat16 x by `in_integers` for products with codes. All else is computed in float32.
    """
    call = jax.ffi.ffi_call(MATMUL, jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), dtype))
    operands, bits = (jax.tree.leaves(w), w.bits) if isinstance(w, QArray) else ([w], 16)
    prologue, eps, parts = "", 0.0, 1
    match x:
        case DeferredNorm(x, weight, eps):
            prologue, operands = "norm", [*operands, weight]
        case DeferredSwiGLU(gate_up):
            prologue, parts, x = "swiglu", gate_up.shape[1], gate_up.reshape(len(gate_up), -1)
    if adds := residual is not None:
        operands = [*operands, residual]
    attributes = {"eps": np.float32(eps), "parts": np.int64(parts), "adds": adds}
    return call(x, *operands, bits=np.int64(bits), variant=variant, prologue=prologue, **attributes)


def in_integers(x: jax.Array, w: QArray) -> jax.Array:
    """Return x [R, c] as the vector kernels round it for products with codes of w, in float32.

    This specifies native/integers.h: 8-bit integers times a scale for each segment of at most 128 inputs. No segment
    crosses a group of w.
    """
    maximum = np.float32(127)
    segment = 4 * STEP if w.group == w.size else math.gcd(w.group, 4 * STEP)
    parts = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -w.size % segment))).reshape(len(x), -1, segment)
    largest = jnp.abs(parts).max(axis=-1, keepdims=True)
    factor = jnp.where(largest > TINY, maximum / jnp.maximum(largest, TINY), 0)
    return (jnp.round(parts * factor) * (largest * (1 / maximum))).reshape(len(x), -1)[:, : w.size]
