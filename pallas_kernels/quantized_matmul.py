"""Products of a few rows with a weight in 8 or 4 bits, which is read once, as it is stored.

Codes arrive in shared memory by the bulk copy engine, several blocks ahead; they become 16-bit floats in registers, go
back to shared memory, and the tensor cores take them from there as their first operand, so that even a single row
leaves none of them idle for want of outputs. The rows are the second operand.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jaxserve.quantization import QArray
from pallas_kernels.blocks import HOPPER, DeviceBlocks
from pallas_kernels.mosaic import from_codes, launch, load, tiles, transposed

WORDS = 32  # of 16 bits that are unpacked at once, 16 // bits codes in each
MAX_ROWS = 256  # above, XLA's dequantisation costs less than reading x for every block of outputs
CHUNK = 128  # rows of one program, at most


def supports(rows: int, dtype: DTypeLike, w: QArray) -> bool:
    """Whether the kernel takes x [rows, C] of a dtype and w [out..., C]."""
    unit = _unit(w.bits)
    return (
        dtype == jnp.bfloat16
        and 1 <= rows <= MAX_ROWS
        and w.bits in (4, 8)
        and math.prod(w.shape[:-1]) % 64 == 0
        and w.size % unit == 0
        and (w.group % unit == 0 or (w.bits == 4 and w.group in (32, 64)))
    )


def quantized_matmul(x: Array, w: QArray, *, blocks: DeviceBlocks = HOPPER, interpret: Any = False) -> Array:
    """x [rows, C] times w [out..., C], summed in float32: [rows, prod(out)].

    The same as a product with `w.dequantize(x.dtype)`, but for the order of the sum; with zeros that are not whole
    numbers, the weights differ by a rounding to bfloat16.
    """
    rows, size = x.shape
    out, unit = math.prod(w.shape[:-1]), _unit(w.bits)
    chunk = min(CHUNK, max(8, 1 << (rows - 1).bit_length()))
    x = jnp.pad(x, ((0, -rows % chunk), (0, 0)))
    if w.bits == 8:  # a word holds two neighbouring codes: all first ones of a unit, then all second ones
        x = x.reshape(len(x), -1, WORDS, 2).swapaxes(2, 3).reshape(x.shape)
    codes = lax.bitcast_convert_type(jnp.asarray(w.codes).reshape(out, -1, 2), jnp.uint16)
    scaling = [jnp.asarray(leaf).reshape(out, -1) for leaf in (w.scales, w.zeros) if leaf is not None]

    sizes = blocks.few_rows if chunk <= 64 else blocks.many_rows
    outs = sizes.outs if out % sizes.outs == 0 else 64
    units, programs = size // unit, out // outs * (len(x) // chunk)
    splits = max(1, min(blocks.cores * sizes.programs // programs, units // (2 * sizes.stages)))
    body = partial(_kernel, bits=w.bits, group=w.group, splits=splits)
    y = launch(
        body,
        out=jax.ShapeDtypeStruct((splits, out, len(x)), jnp.float32),
        grid={"split": splits, "out": out // outs, "chunk": len(x) // chunk},
        scratch={
            "codes_s": plgpu.SMEM((sizes.stages, outs, WORDS), jnp.uint16, transforms=tiles(WORDS, jnp.uint16)),
            "x_s": plgpu.SMEM((sizes.stages, chunk, unit), x.dtype, transforms=tiles(WORDS, x.dtype)),
            "w_s": plgpu.SMEM((2, outs, unit), x.dtype, transforms=tiles(WORDS, x.dtype)),
            "y_s": plgpu.SMEM((outs, chunk), jnp.float32, transforms=tiles(chunk, jnp.float32)),
            "arrived": plgpu.Barrier(num_arrivals=2, num_barriers=sizes.stages),
        },
        interpret=interpret,
    )(x, codes, *scaling)
    return y.sum(axis=0).T[:rows]


def _unit(bits: int) -> int:
    """Codes of one step."""
    return WORDS * 16 // bits


def _kernel(
    x_g, codes_g, *rest_g, codes_s, x_s, w_s, y_s, arrived, bits: int, group: int, splits: int
):  # fmt: skip
    """One program: a block of outputs for a chunk of rows, over a share of the units of C."""
    *scaling_g, y_g = rest_g
    stages, outs, _ = codes_s.shape
    _, chunk, unit = x_s.shape
    out, row = lax.axis_index("out") * outs, lax.axis_index("chunk") * chunk
    split, units = lax.axis_index("split"), codes_g.shape[1] // WORDS
    share = -(-units // splits)
    first = split * share
    after = jnp.minimum(first + share, units)

    def fetch(i: Array) -> None:
        slot = lax.rem(i - first, stages)
        words = codes_g.at[pl.ds(out, outs), pl.ds(i * WORDS, WORDS)]
        plgpu.copy_gmem_to_smem(words, codes_s.at[slot], arrived.at[slot])
        columns = x_g.at[pl.ds(row, chunk), pl.ds(i * unit, unit)]
        plgpu.copy_gmem_to_smem(columns, x_s.at[slot], arrived.at[slot])

    group_starts = range(0, unit, min(group, unit))  # in a unit

    def scaling(i: Array) -> list[list[Array]]:
        """Scales (and zeros) of the groups of a unit; the last unit's again beyond it."""
        i = jnp.minimum(i, units - 1)
        return [
            [
                load(ref, (pl.ds(out, outs), lax.div(i * unit + at, group)), plgpu.Layout.WGMMA.reduce(1))
                for at in group_starts
            ]
            for ref in scaling_g
        ]

    def step(acc: Any, i: Array, by_group: list[list[Array]]) -> list[list[Array]]:
        slot, buffer = lax.rem(i - first, stages), lax.rem(i - first, 2)
        ahead = scaling(i + 1)
        plgpu.barrier_wait(arrived.at[slot])
        words = plgpu.layout_cast(codes_s[slot], plgpu.Layout.WGMMA)
        for plane in range(16 // bits):
            at = plane * len(group_starts) * bits // 16
            numbers = from_codes(lax.shift_right_logical(words, jnp.uint16(plane * bits)), bits)
            scale, *zero = (lax.broadcast_in_dim(values[at], numbers.shape, [0]) for values in by_group)
            if zero:
                numbers = (numbers.astype(zero[0].dtype) - zero[0]).astype(numbers.dtype)
            w = (numbers.astype(scale.dtype) * scale).astype(numbers.dtype)
            w_s[buffer, :, pl.ds(plane * WORDS, WORDS)] = w
        plgpu.commit_smem()
        plgpu.wgmma(acc, w_s.at[buffer], transposed(x_s.at[slot]))
        plgpu.wgmma_wait(1)  # the step before this one has been multiplied: its buffers are free

        @pl.when((i > first) & (i - 1 + stages < after))
        def _() -> None:
            fetch(i - 1 + stages)

        return ahead

    def multiply(acc: Any) -> Array:
        lax.fori_loop(first, after, lambda i, carry: step(acc, i, carry), scaling(first))
        plgpu.wgmma_wait(0)
        return acc[...]

    for i in range(stages):
        pl.when(first + i < after)(partial(fetch, first + i))
    y_s[...] = pl.run_scoped(multiply, plgpu.ACC((outs, chunk), jnp.float32))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(y_s, y_g.at[split, pl.ds(out, outs), pl.ds(row, chunk)])
    plgpu.wait_smem_to_gmem(0)
