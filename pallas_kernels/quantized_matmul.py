"""Products of up to some hundred rows with a weight in 8 or 4 bits, which is read in its stored form.

The bulk copy engine fetches codes to shared memory, several blocks ahead. They become 16-bit floats in registers, from
where the tensor cores take them as the first operand; x is the second operand. So outputs fill the 64 rows of the first
operand, even for a single row of x. A warpgroup multiplies x by whole numbers, and then the sums of each group by the
group's scales, in float32. With many rows, reading x from the L2 cache for every block of outputs takes longest. The
warpgroups of a program therefore share x, and each has outputs of its own.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jaxserve.core.numeric import ceil_div
from jaxserve.quantization import QArray
from pallas_kernels.blocks import HOPPER, DeviceBlocks
from pallas_kernels.mosaic import (
    WARPGROUP,
    WARPGROUP_ROWS,
    from_codes,
    launch,
    load,
    sum_of_products,
    tiles,
    transposed,
)

WORDS = 32  # words of 16 bits that are unpacked at once, with 16 // bits codes each
# Above it XLA's dequantisation costs less than decoding a weight once for every chunk of rows, by the weight's bits.
MAX_ROWS = {4: 1024, 8: 512}

Scaling = list[list[list[Array]]]
"""Scales [64], and zeros if the weight has them, for each part of the outputs and each group of a step."""


def supports(rows: int, dtype: DTypeLike, w: QArray) -> bool:
    """Return whether the kernel takes x [rows, C] of a dtype and w [out..., C]."""
    unit = _unit(w.bits)
    return (
        dtype == jnp.bfloat16
        and w.bits in MAX_ROWS
        and 1 <= rows <= MAX_ROWS[w.bits]
        and math.prod(w.shape[:-1]) % 64 == 0
        and w.size % unit == 0
        and (w.group % unit == 0 or (w.bits == 4 and w.group in (32, 64)))
    )


def quantized_matmul(x: Array, w: QArray, *, blocks: DeviceBlocks = HOPPER, interpret: Any = False) -> Array:
    """Return x [rows, C] times w [out..., C], summed in float32: [rows, prod(out)].

    The result equals a product with `w.dequantize(float32)` except for the order of the sum. If zeros are not whole
    numbers, the weights also differ by a rounding to bfloat16.
    """
    rows, size = x.shape
    out, unit = math.prod(w.shape[:-1]), _unit(w.bits)
    sizes = blocks.product(rows, w.bits)
    chunk = min(sizes.chunk, max(8, 1 << (rows - 1).bit_length()))
    x = jnp.pad(x, ((0, -rows % chunk), (0, 0)))
    # A word holds two adjacent codes, and the kernel takes all first codes of a unit before all second codes.
    if w.bits == 8:
        x = x.reshape(len(x), -1, WORDS, 2).swapaxes(2, 3).reshape(x.shape)
    codes = lax.bitcast_convert_type(jnp.asarray(w.codes).reshape(out, -1, 2), jnp.uint16)
    scaling = [jnp.asarray(leaf).reshape(out, -1) for leaf in (w.scales, w.zeros) if leaf is not None]

    outs, warpgroups = (sizes.outs, sizes.warpgroups) if out % sizes.outs == 0 else (WARPGROUP_ROWS, 1)
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
            "codes_s": plgpu.SMEM(
                (sizes.stages, warpgroups, outs // warpgroups, words), jnp.uint16, transforms=tiles(words, jnp.uint16)
            ),
            "x_s": plgpu.SMEM((sizes.stages, chunk, step), x.dtype, transforms=tiles(WORDS, x.dtype)),
            "arrived": plgpu.Barrier(num_arrivals=warpgroups + 1, num_barriers=sizes.stages),
            "consumed": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=sizes.stages),
        },
        warpgroups=warpgroups,
        interpret=interpret,
    )(x, codes, *scaling)
    return y.sum(axis=0)[:rows]


def words_for(w: QArray, maximum: int) -> int:
    """Return the words of an output to fetch in a step, at most `maximum`.

    Steps divide the inputs evenly, and a step is a whole number of groups or a group a whole number of steps.
    """
    step = maximum // WORDS * _unit(w.bits)
    fits = w.size % step == 0 and (step % w.group == 0 or w.group % step == 0)
    return maximum if fits or maximum == WORDS else words_for(w, maximum // 2)


def splits_for(steps: int, wanted: int, weight_bytes: int, rows: int) -> int:
    """Return the number of shares to split the steps through C into: at most `wanted`, and no share without a step.

    A share has at least two steps. Per output, the sums that all shares write and read have at most a quarter of the
    bytes of the weight.
    """
    maximum = min(wanted, steps // 2, weight_bytes // 4 // (2 * 4 * rows))
    return ceil_div(steps, -(-steps // max(1, maximum)))


def _unit(bits: int) -> int:
    """Return the number of codes in 32 words."""
    return WORDS * 16 // bits


@dataclass(frozen=True)
class Block:
    """The operands of a warpgroup: the codes and scales of its outputs, and the chunk of rows of x of its program.

    Names end in _g for global memory and in _s for shared memory. A step is a fixed number of words of each output.
    """

    x_g: Any
    codes_g: Any
    scaling_g: Sequence[Any]  # scales, and zeros if the weight has them
    codes_s: Any  # [stages, warpgroups, outputs, words]
    x_s: Any  # [stages, chunk, codes of a step]
    arrived: Any  # a barrier for each stage: codes of all warpgroups, and x
    consumed: Any  # a barrier for each stage: all warpgroups have read x
    warpgroup: Array | int
    out: Array  # the first output
    row: Array  # the first row of x
    bits: int
    group: int
    interpret: Any

    @property
    def steps(self) -> int:
        """The number of steps through all of C."""
        return self.codes_g.shape[1] // self.codes_s.shape[3]

    @property
    def parts(self) -> range:
        """The first outputs of the parts that are multiplied at once."""
        return range(0, self.codes_s.shape[2], WARPGROUP_ROWS)

    @property
    def width(self) -> int:
        """The codes of a group within a step."""
        return min(self.group, self.x_s.shape[2])

    @property
    def groups(self) -> range:
        """The first codes of the groups in a step."""
        return range(0, self.x_s.shape[2], self.width)

    def fetch_codes(self, i: Array, slot: Array) -> None:
        """Start to copy the warpgroup's codes of step i."""
        _, _, outs, words = self.codes_s.shape
        codes = self.codes_g.at[pl.ds(self.out, outs), pl.ds(i * words, words)]
        plgpu.copy_gmem_to_smem(codes, self.codes_s.at[slot, self.warpgroup], self.arrived.at[slot])

    def fetch_x(self, i: Array, slot: Array) -> None:
        """Start to copy x of step i, which the first warpgroup does for all."""
        _, chunk, step = self.x_s.shape

        def fetch() -> None:
            columns = self.x_g.at[pl.ds(self.row, chunk), pl.ds(i * step, step)]
            plgpu.copy_gmem_to_smem(columns, self.x_s.at[slot], self.arrived.at[slot])

        if self.codes_s.shape[1] == 1:
            fetch()
        else:
            pl.when(self.warpgroup == 0)(fetch)

    def wait_for_others(self, slot: Array) -> None:
        """Let the first warpgroup wait until no warpgroup reads x of a stage any more."""
        if self.codes_s.shape[1] > 1:
            plgpu.barrier_arrive(self.consumed.at[slot])
            pl.when(self.warpgroup == 0)(lambda: plgpu.barrier_wait(self.consumed.at[slot]))

    def scaling(self, i: Array) -> Scaling:
        """Return the scaling of step i, or of the last step if i is beyond it."""
        at = jnp.minimum(i, self.steps - 1) * self.x_s.shape[2]
        return [
            [[self._scaling(ref, part, at + start) for ref in self.scaling_g] for start in self.groups]
            for part in self.parts
        ]

    def _scaling(self, ref: Any, part: int, at: Array) -> Array:
        rows = pl.ds(self.out + part, WARPGROUP_ROWS)
        return load(ref, (rows, lax.div(at, self.group)), plgpu.Layout.WGMMA.reduce(1))

    def sums(self, slot: Array, part: int, by_group: list[list[Array]]) -> Iterator[Array]:
        """Yield the scaled sums f32 [64, chunk] of each group of a step, for the outputs of a part."""
        own = self.codes_s[slot, self.warpgroup, pl.ds(part, WARPGROUP_ROWS)]
        codes = plgpu.layout_cast(own, plgpu.Layout.WGMMA)
        shape = WARPGROUP_ROWS, self.x_s.shape[1]
        for start, (scale, *zero) in zip(self.groups, by_group, strict=True):
            sums = sum_of_products(shape, self._factors(slot, codes, start, zero), self.interpret)
            yield sums * lax.broadcast_in_dim(scale.astype(jnp.float32), shape, [0])

    def _factors(self, slot: Array, codes: Array, start: int, zero: list[Array]) -> Iterator[tuple[Array, Any]]:
        """Yield the factors (numbers, x) of the group that begins at code `start` of a step."""
        planes = 16 // self.bits
        for at in range(start, start + self.width, WORDS):
            unit, plane = divmod(at // WORDS, planes)
            words = codes[:, unit * WORDS : (unit + 1) * WORDS]
            numbers = from_codes(words, plane * self.bits, self.bits, self.interpret)
            if zero:
                zeros = lax.broadcast_in_dim(*zero, numbers.shape, [0])
                numbers = (numbers.astype(zeros.dtype) - zeros).astype(numbers.dtype)
            yield numbers, self.x_s.at[slot, :, pl.ds(at, WORDS)]


def _kernel(
    x_g, codes_g, *rest_g, codes_s, x_s, arrived, consumed, bits: int, group: int, splits: int, interpret: Any
):  # fmt: skip
    """Run one warpgroup: a block of outputs for a chunk of rows, over a share of the steps through C.

    Outputs are multiplied in parts of 64, one after another, all with the same x.
    """
    *scaling_g, y_g = rest_g
    (stages, warpgroups, outs, _), chunk = codes_s.shape, x_s.shape[1]
    warpgroup = lax.axis_index(WARPGROUP) if warpgroups > 1 else 0
    out = (lax.axis_index("out") * warpgroups + warpgroup) * outs
    row, split = lax.axis_index("chunk") * chunk, lax.axis_index("split")
    barriers = arrived, consumed
    block = Block(x_g, codes_g, scaling_g, codes_s, x_s, *barriers, warpgroup, out, row, bits, group, interpret)
    share = ceil_div(block.steps, splits)
    first = split * share
    after = jnp.minimum(first + share, block.steps)

    def step(i: Array, carry: tuple[list[Array], Scaling]) -> tuple[list[Array], Scaling]:
        slot = lax.rem(i - first, stages)
        next_scaling = block.scaling(i + 1)  # loaded before the wait, so that its latency is hidden
        plgpu.barrier_wait(arrived.at[slot])
        totals = []
        for part, total, by_group in zip(block.parts, *carry, strict=True):
            totals.append(sum(block.sums(slot, part, by_group), total))

        @pl.when(i + stages < after)
        def _() -> None:
            plgpu.commit_smem()  # registers have read the codes, which the copy engine now overwrites
            block.fetch_codes(i + stages, slot)
            block.wait_for_others(slot)
            block.fetch_x(i + stages, slot)

        return totals, next_scaling

    def begin(stage: int) -> None:
        block.fetch_codes(first + stage, stage)
        block.fetch_x(first + stage, stage)

    for stage in range(stages):
        pl.when(first + stage < after)(partial(begin, stage))
    nothing = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, chunk), jnp.float32), plgpu.Layout.WGMMA)
    totals, _ = lax.fori_loop(first, after, step, ([nothing for _ in block.parts], block.scaling(first)))
    for part, total in zip(block.parts, totals, strict=True):
        y = transposed(y_g.at[split, pl.ds(row, chunk), pl.ds(out + part, WARPGROUP_ROWS)])
        y[...] = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
