"""Packing of codes of 3, 4 or 8 bits into bytes, in the layout that the kernels read.

Codes are unsigned. They are packed along the last axis in units, and the last unit is filled with the code of zero:

- 8 bits: one byte each.
- 4 bits, units of 128 codes in 32 little-endian words of 16 bits: word i holds the codes i, i + 32, i + 64, i + 96,
  lowest bits first. So 32 neighbouring codes are one shift away in the 32 lanes of a 512-bit vector, and a look-up by
  the lowest bits of each lane turns them into numbers.
- 3 bits, units of 256 codes in 96 bytes: the two low bits of code i in word i % 32 of 32 words, at bit 2 * (i // 32);
  then the high bits as eight words of 32 bits, word j for the codes 32 j ... 32 j + 31: a vector's mask.
"""

import sys

import numpy as np

from jaxserve.core.numeric import ceil_div

UNIT = {8: 1, 4: 128, 3: 256}  # codes of a unit, by bits
UNIT_BYTES = {8: 1, 4: 64, 3: 96}  # bytes of a unit, by bits
LANES = 32

assert sys.byteorder == "little"


def packed_bytes(bits: int, size: int) -> int:
    """Return the bytes that `size` codes take."""
    return ceil_div(size, UNIT[bits]) * UNIT_BYTES[bits]


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes below 2**bits, uint8 [..., size], into uint8 [..., packed_bytes]."""
    size, unit = codes.shape[-1], UNIT[bits]
    if bits == 8:
        return np.ascontiguousarray(codes)
    filled = np.full((*codes.shape[:-1], ceil_div(size, unit) * unit), 1 << (bits - 1), np.uint8)
    filled[..., :size] = codes
    planes = filled.reshape(*codes.shape[:-1], -1, unit // LANES, LANES)  # [..., unit, plane, lane]
    if bits == 4:
        words = _in_words(planes, 4)
        return words.view(np.uint8).reshape(*codes.shape[:-1], -1)
    low = _in_words(planes & 3, 2).view(np.uint8)  # [..., unit, 64]
    high = np.packbits(planes >> 2, axis=-1, bitorder="little").reshape(*low.shape[:-1], LANES)
    return np.concatenate([low, high], axis=-1).reshape(*codes.shape[:-1], -1)


def unpack(packed: np.ndarray, bits: int, size: int) -> np.ndarray:
    """Unpack uint8 [..., packed_bytes] into codes uint8 [..., size], the inverse of `pack`."""
    if bits == 8:
        return packed
    units = packed.reshape(*packed.shape[:-1], -1, UNIT_BYTES[bits])
    words = np.ascontiguousarray(units[..., :64]).view("<u2")
    width = 4 if bits == 4 else 2
    shifts = width * np.arange(16 // width, dtype=np.uint16)
    planes = (words[..., None, :] >> shifts[:, None] & (1 << width) - 1).astype(np.uint8)
    if bits == 3:
        masks = np.ascontiguousarray(units[..., 64:]).reshape(*units.shape[:-1], 8, 4)
        planes |= np.unpackbits(masks, axis=-1, bitorder="little") << 2
    return planes.reshape(*packed.shape[:-1], -1)[..., :size]


def _in_words(planes: np.ndarray, width: int) -> np.ndarray:
    """Pack planes [..., planes, 32] into words [..., 32], with plane j at bit width * j."""
    words = np.zeros((*planes.shape[:-2], LANES), "<u2")
    for index in range(planes.shape[-2]):
        words |= planes[..., index, :].astype(np.uint16) << (width * index)
    return words
