"""What differs between the supported versions of JAX, and how a Mosaic GPU kernel is launched."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

WARPGROUP_ROWS = 64  # of the first operand of a warpgroup's product
SWIZZLES = (128, 64, 32)  # bytes of a row
CAN_INTERPRET = hasattr(plgpu, "InterpretGPUParams")  # jax 0.11 and later


def transposed(ref: Any) -> Any:
    """A view [n, m] of a reference [m, n]."""
    return ref.transpose((1, 0)) if jax.__version_info__ >= (0, 11) else plgpu.transpose_ref(ref, (1, 0))


def load(ref: Any, index: tuple[Any, ...], layout: Any) -> Any:
    """Values of a reference into device memory, where they need not be neighbours, in registers of a layout."""
    if jax.__version_info__ >= (0, 11):
        return plgpu.load(ref.at[index], layout=layout, optimized=False)
    return plgpu.load(ref, index, layout=layout, optimized=False)


def tiles(width: int, dtype: Any) -> tuple[Any, ...]:
    """How a matrix [..., width] lies in shared memory: tiles of 8 rows, swizzled against bank conflicts.

    The widest of the swizzles that divide a row.
    """
    itemsize = jnp.dtype(dtype).itemsize
    for tile in SWIZZLES:
        if width * itemsize % tile == 0:
            return plgpu.TilingTransform((8, tile // itemsize)), plgpu.SwizzleTransform(tile)
    raise ValueError(f"rows of {width * itemsize} bytes cannot be swizzled, only whole multiples of {SWIZZLES[-1]}")


def from_codes(codes: Array, bits: int) -> Array:
    """The numbers u - 2**(bits - 1) of 4 or 8-bit codes u in the lowest bits of words of 16, as bfloat16, exactly.

    Without a conversion: a code's bits become the lowest of the mantissa of 128.0, whose last place is 1, and 128 and
    half of the code's range are subtracted.
    """
    one_is_last_place = jnp.uint16(0x4300)  # 128.0
    if bits == 4:
        return _as_float((codes & jnp.uint16(15)) | one_is_last_place) - jnp.bfloat16(136)
    low = _as_float((codes & jnp.uint16(127)) | one_is_last_place)
    return low - _as_float((codes & jnp.uint16(128)) ^ jnp.uint16(0x4380))  # 128.0 with the highest bit, else 256.0


def _as_float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def launch(
    kernel: Callable[..., None],
    out: Any,
    grid: Mapping[str, int],
    scratch: Mapping[str, Any],
    *,
    interpret: Any = False,
) -> Callable[..., Any]:
    """A function of device arrays that runs `kernel(*inputs, *outputs, **scratch)` once per point of the grid.

    Each program is one warpgroup. It has the barriers that Mosaic puts around copies and stores: kernels refill buffers
    that other warps have read without one of their own. The last axis of the grid varies fastest. `interpret` simulates
    the launch on a CPU instead: True, or JAX's own parameters (`InterpretGPUParams`).
    """
    if interpret is True:
        interpret = plgpu.InterpretGPUParams()
    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        scratch_types=dict(scratch),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
