"""Host arrays aligned to 64 bytes, which XLA on CPU uses without a copy."""

from math import prod

import numpy as np

ALIGNMENT = 64  # bytes


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an aligned array of zeros."""
    size = prod(shape) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def aligned(array: np.ndarray) -> np.ndarray:
    """Return the array if it is contiguous and aligned, else an aligned copy."""
    if array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0:
        return array
    copy = aligned_zeros(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy
