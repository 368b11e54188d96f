"""Launch of Mosaic GPU kernels, operations on registers, and the differences between versions of JAX."""

from collections.abc import Hashable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.once import Launch, lowered_once

WARPGROUP = "warpgroup"  # the axis of the warpgroups of a program
WARPGROUP_ROWS = 64  # rows of the first operand of a warpgroup's product
SWIZZLES = (128, 64, 32)  # bytes
CAN_INTERPRET = hasattr(plgpu, "InterpretGPUParams")  # jax 0.11 and later


def transposed(ref: Any) -> Any:
    """Return a view [n, m] of a reference [m, n]."""
    return ref.transpose((1, 0)) if jax.__version_info__ >= (0, 11) else plgpu.transpose_ref(ref, (1, 0))


def load(ref: Any, index: tuple[Any, ...], layout: Any) -> Any:
    """Return the values at an index of a reference in registers of a layout; they need not be contiguous."""
    if jax.__version_info__ >= (0, 11):
        return plgpu.load(ref.at[index], layout=layout, optimized=False)
    return plgpu.load(ref, index, layout=layout, optimized=False)


def tiles(width: int, dtype: Any) -> tuple[Any, ...]:
    """Return the layout of a matrix [..., width] in shared memory: tiles of 8 rows, swizzled against bank conflicts.

    The swizzle is the widest that divides a row. Raise `ValueError` if none does.
    """
    itemsize = jnp.dtype(dtype).itemsize
    for tile in SWIZZLES:
        if width * itemsize % tile == 0:
            return plgpu.TilingTransform((8, tile // itemsize)), plgpu.SwizzleTransform(tile)
    raise ValueError(
        f"rows of {width * itemsize} bytes cannot be swizzled: they must be a multiple of {SWIZZLES[-1]} bytes"
    )


def from_codes(words: Array, shift: int, bits: int, interpret: Any, *, signed: bool = False) -> Array:
    """Return the exact numbers u - 2**(bits - 1) in bfloat16 of 4- or 8-bit codes u at bit `shift` of 16-bit words.

    Words [..., n] and numbers have the layout of a product; n is even. With `signed`, 8-bit codes are two's complement.
    No conversion is needed: the bits of a code become the lowest bits of the mantissa of 128.0, whose last place is 1.
    Then 128 and half of the code's range are subtracted.
    """
    pick = partial(_picked, words, shift, interpret=interpret)
    if bits == 4:
        return pick(0x0F, 0x4300) - jnp.bfloat16(136)
    return pick(0x7F, 0x4300) - pick(0x80, 0x4300 if signed else 0x4380)  # 128.0, or 256.0 for what is below 0


def _picked(words: Array, shift: int, mask: int, pattern: int, *, interpret: Any) -> Array:
    """Return ((words >> shift) & mask) ^ pattern as bfloat16.

    Two words are processed at once, with one instruction for the shift and one for the rest, where the compiler needs
    three and two for each word. The mask must exclude the bits that a shift moves in from the neighbouring word.
    """
    if interpret:
        picked = (lax.shift_right_logical(words, jnp.uint16(shift)) & jnp.uint16(mask)) ^ jnp.uint16(pattern)
    else:
        layout = plgpu.Layout.WGMMA
        result = plgpu.ShapeDtypeStruct(words.shape, words.dtype, layout=layout)
        picked = plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(partial(_pick, shift, mask, pattern))(words)
    return lax.bitcast_convert_type(picked, jnp.bfloat16)


def _pick(shift: int, mask: int, pattern: int, _: Any, words: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    """Compute `_picked` on the registers of an array, each of which holds two words. 0x6a is (a & b) ^ c."""
    pair = ir.IntegerType.get_signless(32)
    both = [mgpu.c(value << 16 | value, pair) for value in (mask, pattern)]
    registers = np.empty_like(words.registers)
    for index, register in np.ndenumerate(words.registers):
        value = mgpu.utils.bitcast(register, pair)
        if shift:
            value = arith.shrui(value, mgpu.c(shift, pair))
        value = llvm.inline_asm(pair, [value, *both], "lop3.b32 $0, $1, $2, $3, 0x6a;", "=r,r,r,r")
        registers[index] = mgpu.utils.bitcast(value, register.type)
    return mgpu.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=words.is_signed)


def sum_of_products(shape: tuple[int, int], factors: Iterable[tuple[Array, Any]], interpret: Any) -> Array:
    """Return the sum f32 [M, N] of w @ x.T over pairs of w [M, K] in registers and x [N, K] in shared memory."""
    if interpret:  # the simulation cannot multiply registers
        over_k = (((1,), (1,)), ((), ()))
        return sum(lax.dot_general(w, x[...], over_k, preferred_element_type=jnp.float32) for w, x in factors)

    def body(acc: Any) -> Array:
        for w, x in factors:
            plgpu.wgmma(acc, w, transposed(x))
        plgpu.wgmma_wait(0)
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))


def launch(
    kernel: partial[None],
    out: Hashable,
    grid: Mapping[str, int],
    scratch: Mapping[str, Any],
    *,
    warpgroups: int = 1,
    interpret: Any = False,
) -> Launch:
    """Return a function of device arrays that runs `kernel(*inputs, *outputs, **scratch)` at each point of the grid.

    Each program has `warpgroups` warpgroups, which have its shared memory in common. Kernels rely on the barriers that
    Mosaic puts around copies and stores when they refill buffers that other warps have read. The last axis of the grid
    varies fastest. `interpret` simulates the launch on a CPU instead: True, or JAX's parameters for it
    (`InterpretGPUParams`).

    A kernel is lowered once (`once`) for equal arguments of this function and operands of equal shapes. Its behaviour
    must depend on nothing else, and the arguments bound to `kernel` must be hashable.
    """
    if interpret is True:
        interpret = plgpu.InterpretGPUParams()
    call = plgpu.kernel(
        kernel,
        out_type=out,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        scratch_types=dict(scratch),
        **({"num_threads": warpgroups, "thread_name": WARPGROUP} if warpgroups > 1 else {}),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    static = (kernel.func, kernel.args, frozenset(kernel.keywords.items()))
    identity = (static, out, tuple(grid.items()), tuple(scratch.items()), warpgroups)

    def launched(*operands: Array) -> Any:
        # XLA may pass a slice of another array without a copy, at any offset, and Mosaic refuses an address that is not
        # a multiple of 256. The barrier forces a copy.
        operands = lax.optimization_barrier(operands)
        return (call if interpret else lowered_once(call, identity, operands))(*operands)

    return launched
