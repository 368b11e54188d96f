"""Rounding of a weight to the nearest QArray, without calibration data."""

import ml_dtypes
import numpy as np

from jaxserve.core.errors import ConfigError
from jaxserve.quantization.packing import pack
from jaxserve.quantization.qarray import QArray

GROUP = 128
GROUPS = (128, 64, 32)


def group_size(size: int, wanted: int = GROUP) -> int:
    """Return the largest of `GROUPS` that is at most `wanted` and divides `size`, or `size` if none does."""
    return next((group for group in GROUPS if group <= wanted and size % group == 0), size)


def quantize(
    w: np.ndarray, bits: int, *, group: int = GROUP, symmetric: bool = True, scale_dtype: np.dtype = ml_dtypes.bfloat16
) -> QArray:
    """Return the QArray of numpy arrays nearest to a weight w [out..., C]. `group` 0: one scale per output.

    With b bits, codes without their offset are in [-2**(b-1), 2**(b-1) - 1]. A symmetric scale of 3 or 4 bits maps the
    value of largest magnitude to -2**(b-1), and so may be negative. A symmetric scale of 8 bits is positive and maps
    the largest magnitude to 2**(b-1) - 1. An asymmetric scale and zero map the range of values, which includes 0, to
    the range of codes.

    Raise `ConfigError` for other bits than 8, 4 or 3.
    """
    if bits not in (3, 4, 8):
        raise ConfigError(f"weights can have 8, 4 or 3 bits, not {bits}")
    size = w.shape[-1]
    group = size if group == 0 else group_size(size, group)
    grouped = np.asarray(w, np.float32).reshape(*w.shape[:-1], size // group, group)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if symmetric:
        extreme = np.take_along_axis(grouped, np.abs(grouped).argmax(-1, keepdims=True), -1)[..., 0]
        scales = np.maximum(np.abs(extreme) / high, np.abs(extreme) / -low) if bits == 8 else extreme / low
        zeros = None
    else:
        least, most = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
        scales = (most - least) / (high - low)
    scales = scales.astype(scale_dtype)  # before the comparison: a small scale may become 0
    scales[scales == 0] = 1
    wide = scales.astype(np.float32)
    if not symmetric:
        zeros = np.clip(np.rint(-least / wide) + low, low, high).astype(scale_dtype)
    shifted = grouped / wide[..., None] + (0 if zeros is None else zeros.astype(np.float32)[..., None])
    codes = (np.clip(np.rint(shifted), low, high) - low).astype(np.uint8)
    return QArray(pack(codes.reshape(w.shape), bits), scales, zeros, bits, size)
