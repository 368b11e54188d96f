"""Products of a few rows with a weight in 8 or 4 bits, which is read once, as it is stored.

Codes arrive in shared memory by the bulk copy engine, several blocks ahead. They become 16-bit floats in registers, and
the tensor cores take them from there as their first operand, so that even a single row leaves none of them idle for
want of outputs; x is the second operand. What a warpgroup multiplies are whole numbers: the sums of a group are
multiplied by its scales, in float32, of which there are few.
"""

import math
from collections.abc import Iterator
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
from pallas_kernels.mosaic import WARPGROUP_ROWS, from_codes, launch, load, sum_of_products, tiles, transposed

WORDS = 32  # of 16 bits that are unpacked at once, 16 // bits codes in each
MAX_ROWS = 256  # above, XLA's dequantisation costs less than reading x for every block of outputs
CHUNK = 128  # rows of one program, at most

Scaling = list[list[list[Array]]]
"""By part of the outputs and group of a step: scales [64], and zeros if there are any."""


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

    The same as a product with `w.dequantize(float32)`, but for the order of the sum; zeros that are not whole numbers
    make weights that differ by a rounding to bfloat16.
    """
    rows, size = x.shape
    out, unit = math.prod(w.shape[:-1]), _unit(w.bits)
    chunk = min(CHUNK, max(8, 1 << (rows - 1).bit_length()))
    x = jnp.pad(x, ((0, -rows % chunk), (0, 0)))
    if w.bits == 8:  # a word holds two neighbouring codes: all first ones of a unit, then all second ones
        x = x.reshape(len(x), -1, WORDS, 2).swapaxes(2, 3).reshape(x.shape)
    codes = lax.bitcast_convert_type(jnp.asarray(w.codes).reshape(out, -1, 2), jnp.uint16)
    scaling = [jnp.asarray(leaf).reshape(out, -1) for leaf in (w.scales, w.zeros) if leaf is not None]

    sizes = blocks.few_rows if chunk <= 32 else blocks.many_rows
    outs = sizes.outs if out % sizes.outs == 0 else 64
    words = words_for(w, sizes.words)
    step = words // WORDS * unit
    steps, programs = size // step, out // outs * (len(x) // chunk)
    splits = splits_for(steps, blocks.cores * sizes.programs // programs, size * w.bits // 8, chunk)
    body = partial(_kernel, bits=w.bits, group=w.group, splits=splits, interpret=interpret)
    y = launch(
        body,
        out=jax.ShapeDtypeStruct((splits, len(x), out), jnp.float32),
        grid={"split": splits, "out": out // outs, "chunk": len(x) // chunk},
        scratch={
            "codes_s": plgpu.SMEM((sizes.stages, outs, words), jnp.uint16, transforms=tiles(words, jnp.uint16)),
            "x_s": plgpu.SMEM((sizes.stages, chunk, step), x.dtype, transforms=tiles(WORDS, x.dtype)),
            "arrived": plgpu.Barrier(num_arrivals=2, num_barriers=sizes.stages),
        },
        interpret=interpret,
    )(x, codes, *scaling)
    return y.sum(axis=0)[:rows]


def words_for(w: QArray, most: int) -> int:
    """How many words of an output to fetch at once: the weight, and each group or step, are whole numbers of them."""
    step = most // WORDS * _unit(w.bits)
    fits = w.size % step == 0 and (step % w.group == 0 or w.group % step == 0)
    return most if fits or most == WORDS else words_for(w, most // 2)


def splits_for(steps: int, wanted: int, weight_bytes: int, rows: int) -> int:
    """Into how many shares to cut the steps through C: at most as wanted, none without a step.

    Each has two steps at least, and all of them write and read at most a quarter as many bytes of sums as there are of
    the weight, per output.
    """
    most = min(wanted, steps // 2, weight_bytes // 4 // (2 * 4 * rows))
    return -(-steps // -(-steps // max(1, most)))


def _unit(bits: int) -> int:
    """Codes in 32 words."""
    return WORDS * 16 // bits


def _kernel(
    x_g, codes_g, *rest_g, codes_s, x_s, arrived, bits: int, group: int, splits: int, interpret: Any
):  # fmt: skip
    """One program: a block of outputs for a chunk of rows, over a share of the steps through C.

    Its outputs are multiplied 64 at a time, one after the other, all with the same x.
    """
    *scaling_g, y_g = rest_g
    stages, outs, words = codes_s.shape
    _, chunk, step_size = x_s.shape
    out, row = lax.axis_index("out") * outs, lax.axis_index("chunk") * chunk
    split, steps = lax.axis_index("split"), codes_g.shape[1] // words
    share = -(-steps // splits)
    first = split * share
    after = jnp.minimum(first + share, steps)

    planes = 16 // bits
    width = min(group, step_size)  # of a group within a step
    groups, parts = range(0, step_size, width), range(0, outs, WARPGROUP_ROWS)

    def fetch(i: Array) -> None:
        slot = lax.rem(i - first, stages)
        block = codes_g.at[pl.ds(out, outs), pl.ds(i * words, words)]
        plgpu.copy_gmem_to_smem(block, codes_s.at[slot], arrived.at[slot])
        columns = x_g.at[pl.ds(row, chunk), pl.ds(i * step_size, step_size)]
        plgpu.copy_gmem_to_smem(columns, x_s.at[slot], arrived.at[slot])

    def scaling(i: Array) -> Scaling:
        """Of the outputs of each part and the groups of a step; the last step's again beyond it."""
        at = jnp.minimum(i, steps - 1) * step_size
        by_row = plgpu.Layout.WGMMA.reduce(1)
        return [
            [
                [
                    load(ref, (pl.ds(out + part, WARPGROUP_ROWS), lax.div(at + start, group)), by_row)
                    for ref in scaling_g
                ]
                for start in groups
            ]
            for part in parts
        ]

    def factors(slot: Array, block: Array, start: int, zero: list[Array]) -> Iterator[tuple[Array, Any]]:
        """Numbers and x of the group of a step that begins at a code; `block` are the codes of the step."""
        for at in range(start, start + width, WORDS):
            unit, plane = divmod(at // WORDS, planes)
            numbers = from_codes(block[:, unit * WORDS : (unit + 1) * WORDS], plane * bits, bits, interpret)
            if zero:
                zeros = lax.broadcast_in_dim(*zero, numbers.shape, [0])
                numbers = (numbers.astype(zeros.dtype) - zeros).astype(numbers.dtype)
            yield numbers, x_s.at[slot, :, pl.ds(at, WORDS)]

    def step(i: Array, carry: tuple[list[Array], Scaling]) -> tuple[list[Array], Scaling]:
        slot = lax.rem(i - first, stages)
        ahead = scaling(i + 1)
        plgpu.barrier_wait(arrived.at[slot])
        totals = []
        for part, total, by_group in zip(parts, *carry, strict=True):
            block = plgpu.layout_cast(codes_s[slot, pl.ds(part, WARPGROUP_ROWS)], plgpu.Layout.WGMMA)
            for start, (scale, *zero) in zip(groups, by_group, strict=True):
                sums = sum_of_products(total.shape, factors(slot, block, start, zero), interpret)
                total += sums * lax.broadcast_in_dim(scale.astype(jnp.float32), sums.shape, [0])
            totals.append(total)

        @pl.when(i + stages < after)
        def _() -> None:
            plgpu.commit_smem()  # codes have been read as registers read them, and are overwritten by the copy engine
            fetch(i + stages)

        return totals, ahead

    for i in range(stages):
        pl.when(first + i < after)(partial(fetch, first + i))
    nothing = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, chunk), jnp.float32), plgpu.Layout.WGMMA)
    totals, _ = lax.fori_loop(first, after, step, ([nothing for _ in parts], scaling(first)))
    for part, total in zip(parts, totals, strict=True):
        y = transposed(y_g.at[split, pl.ds(row, chunk), pl.ds(out + part, WARPGROUP_ROWS)])
        y[...] = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
