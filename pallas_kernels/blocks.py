"""Block sizes of the kernels by device kind, as `bench/autotune.py` measures them.

They change the speed of a kernel, never its result.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

FEW_ROWS = 32  # of x, up to which a product takes other block sizes than above
# Of x, above which reading x for every block of outputs takes longest, by the bits of the weight.
SHARING_ROWS = {4: 64, 8: 128}


@dataclass(frozen=True)
class AttentionBlocks:
    """The block sizes of attention."""

    keys: int = 64  # keys of a tile: 64 or 128
    stages: int = 2  # tiles of keys and values in shared memory, at least 2


@dataclass(frozen=True)
class MatmulBlocks:
    """The block sizes of a product with a quantised weight."""

    outs: int  # outputs of a program: 64 or a multiple, for each of its warpgroups
    chunk: int  # maximum number of rows of a program: 8, 16, 32, 64 or 128
    stages: int  # blocks of codes and of x in shared memory, at least 2
    programs: int  # maximum number per core
    words: int  # 16-bit words of an output that are fetched at once: 32, 64 or 128
    warpgroups: int = 1  # of a program, which share x


@dataclass(frozen=True)
class DeviceBlocks:
    """The block sizes of all kernels on one kind of device."""

    cores: int  # streaming multiprocessors
    decode: AttentionBlocks
    prefill: AttentionBlocks
    split_keys: int  # minimum number of keys for a program of its own
    programs: int  # maximum number of attention programs per core
    few_rows: MatmulBlocks  # for up to `FEW_ROWS` rows
    many_rows: MatmulBlocks
    shared: Mapping[int, MatmulBlocks]  # for more than `SHARING_ROWS`, by the bits of the weight

    def product(self, rows: int, bits: int) -> MatmulBlocks:
        """Return the block sizes of a product of this many rows with a weight of some bits."""
        if rows > SHARING_ROWS[bits]:
            return self.shared[bits]
        return self.few_rows if rows <= FEW_ROWS else self.many_rows


HOPPER = DeviceBlocks(
    cores=132,
    decode=AttentionBlocks(64, 2),
    prefill=AttentionBlocks(64, 2),
    split_keys=128,
    programs=2,
    few_rows=MatmulBlocks(outs=64, chunk=32, stages=3, programs=8, words=64),
    many_rows=MatmulBlocks(outs=64, chunk=128, stages=3, programs=2, words=32),
    shared={
        4: MatmulBlocks(outs=128, chunk=128, stages=4, programs=1, words=32, warpgroups=2),
        8: MatmulBlocks(outs=128, chunk=64, stages=3, programs=1, words=64, warpgroups=2),
    },
)
TABLE: dict[str, DeviceBlocks] = {  # measured, by jax.Device.device_kind
    "NVIDIA H200": replace(
        HOPPER,
        few_rows=MatmulBlocks(outs=64, chunk=32, stages=2, programs=8, words=128),
        many_rows=MatmulBlocks(outs=128, chunk=64, stages=2, programs=2, words=64),
    ),
}


def blocks_for(device_kind: str) -> DeviceBlocks:
    """Return the measured sizes of a device kind, or sizes derived from the data sheet of its generation."""
    return TABLE.get(device_kind, HOPPER)
