"""Block sizes by device kind: the table that `bench/autotune.py` measures for.

They change the speed of a kernel, never what it computes.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class AttentionBlocks:
    """One launch of attention."""

    keys: int = 64  # of a tile: 64 or 128
    stages: int = 2  # tiles of keys and values in shared memory, at least 2


@dataclass(frozen=True)
class MatmulBlocks:
    """One launch of a product with a quantised weight."""

    outs: int  # outputs of a program: 64, 128 or 256
    stages: int  # blocks of codes and of x in shared memory, at least 2
    programs: int  # per core that a product is split into, at most
    words: int  # of 16 bits of an output that are fetched at once: 32, 64 or 128


@dataclass(frozen=True)
class DeviceBlocks:
    """All kernels on one kind of device."""

    cores: int  # streaming multiprocessors
    decode: AttentionBlocks
    prefill: AttentionBlocks
    split_keys: int  # fewest keys of a sequence that are worth a program of their own
    programs: int  # per core that attention is split into, at most
    few_rows: MatmulBlocks  # up to 32
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
TABLE: dict[str, DeviceBlocks] = {  # what was measured, by jax.Device.device_kind
    "NVIDIA H200": replace(HOPPER, few_rows=MatmulBlocks(outs=64, stages=2, programs=8, words=128)),
}


def blocks_for(device_kind: str) -> DeviceBlocks:
    """The measured sizes of a device kind; for others, what its generation's sizes in the data sheet suggest."""
    return TABLE.get(device_kind, HOPPER)
