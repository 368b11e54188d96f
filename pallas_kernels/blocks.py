"""Block sizes of the kernels by device kind, as `bench/autotune.py` measures them.

They change the speed of a kernel, never its result.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class AttentionBlocks:
    """The block sizes of attention."""

    keys: int = 64  # keys of a tile: 64 or 128
    stages: int = 2  # tiles of keys and values in shared memory, at least 2


@dataclass(frozen=True)
class MatmulBlocks:
    """The block sizes of a product with a quantised weight."""

    outs: int  # outputs of a program: 64, 128 or 256
    stages: int  # blocks of codes and of x in shared memory, at least 2
    programs: int  # maximum number per core
    words: int  # 16-bit words of an output that are fetched at once: 32, 64 or 128


@dataclass(frozen=True)
class DeviceBlocks:
    """The block sizes of all kernels on one kind of device."""

    cores: int  # streaming multiprocessors
    decode: AttentionBlocks
    prefill: AttentionBlocks
    split_keys: int  # minimum number of keys for a program of its own
    programs: int  # maximum number of attention programs per core
    few_rows: MatmulBlocks  # for up to 32 rows
    many_rows: MatmulBlocks


HOPPER = DeviceBlocks(
    cores=132,
    decode=AttentionBlocks(64, 2),
    prefill=AttentionBlocks(64, 2),
    split_keys=128,
    programs=2,
    few_rows=MatmulBlocks(outs=64, stages=3, programs=8, words=64),
    many_rows=MatmulBlocks(outs=64, stages=3, programs=2, words=32),
)
TABLE: dict[str, DeviceBlocks] = {  # measured, by jax.Device.device_kind
    "NVIDIA H200": replace(HOPPER, few_rows=MatmulBlocks(outs=64, stages=2, programs=8, words=128)),
}


def blocks_for(device_kind: str) -> DeviceBlocks:
    """Return the measured sizes of a device kind, or sizes derived from the data sheet of its generation."""
    return TABLE.get(device_kind, HOPPER)
