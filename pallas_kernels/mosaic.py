"""What differs between the supported versions of JAX, and how a Mosaic GPU kernel is launched."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

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


def launch(
    kernel: Callable[..., None],
    out: Any,
    grid: Mapping[str, int],
    scratch: Mapping[str, Any],
    *,
    interpret: Any = False,
) -> Callable[..., Any]:
    """A function of device arrays that runs `kernel(*inputs, *outputs, **scratch)` once per point of the grid.

    Each program is one warpgroup. The last axis of the grid varies fastest. `interpret` simulates the launch on a CPU
    instead: True, or JAX's own parameters (`InterpretGPUParams`).
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
