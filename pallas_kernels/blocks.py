"""Block sizes by device kind: the table that `bench/autotune.py` measures for.

They change the speed of a kernel, never what it computes.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionBlocks:
    """One launch of attention."""

    keys: int = 64  # of a tile: 64 or 128
    stages: int = 2  # tiles of keys and values in shared memory, at least 2


@dataclass(frozen=True)
class DeviceBlocks:
    """All kernels on one kind of device."""

    cores: int  # streaming multiprocessors
    decode: AttentionBlocks
    prefill: AttentionBlocks
    split_keys: int  # fewest keys of a sequence that are worth a program of their own
    programs: int  # per core that attention is split into, at most


HOPPER = DeviceBlocks(
    cores=132, decode=AttentionBlocks(64, 2), prefill=AttentionBlocks(64, 2), split_keys=128, programs=2
)
TABLE: dict[str, DeviceBlocks] = {}  # what was measured, by jax.Device.device_kind


def blocks_for(device_kind: str) -> DeviceBlocks:
    """The measured sizes of a device kind; for others, what its generation's sizes in the data sheet suggest."""
    return TABLE.get(device_kind, HOPPER)
