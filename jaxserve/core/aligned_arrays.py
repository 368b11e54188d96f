"""Host arrays that lie so that XLA uses them on CPU as they are, without a copy."""

from math import prod

import numpy as np

ALIGNMENT = 64  # bytes


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of zeros that lies so."""
    size = prod(shape) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def aligned(array: np.ndarray) -> np.ndarray:
    """The array itself if it lies so, else a copy that does."""
    if array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0:
        return array
    copy = aligned_zeros(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy
