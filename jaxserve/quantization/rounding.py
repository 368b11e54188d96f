"""Rounding of a weight to the nearest QArray, without calibration data. `scale_search` has a closer one."""

import ml_dtypes
import numpy as np

from jaxserve.core.errors import ConfigError
from jaxserve.core.scale_groups import GROUP, GROUPS, group_size
from jaxserve.quantization.packing import pack
from jaxserve.quantization.qarray import QArray


def quantize(
    w: np.ndarray,
    bits: int,
    *,
    group: int = GROUP,
    symmetric: bool = True,
    scale_dtype: np.dtype = ml_dtypes.bfloat16,
) -> QArray:
    """Return the QArray of numpy arrays nearest to a weight w [out..., C]. `group` is `wanted` of `group_size`.

    With b bits, codes without their offset are in [-2**(b-1), 2**(b-1) - 1]. A symmetric scale of 3 or 4 bits maps the
    value of largest magnitude to -2**(b-1), and so may be negative. A symmetric scale of 8 bits is positive and maps
    the largest magnitude to 2**(b-1) - 1. An asymmetric scale and zero map the range of values, which includes 0, to
    the range of codes.

    Raise `ConfigError` for other bits than 8, 4 or 3.
    """
    x = in_groups(w, bits, group_size(w.shape[-1], group))
    scales, zeros = plain_grid(x, bits, symmetric, scale_dtype)
    return packed(
        w.shape, codes_of(x, scales, zeros, bits), scales, zeros if not symmetric else None, bits, scale_dtype
    )


# -- parts, for x float32 [group, groups]: neighbouring groups of a weight, with their numbers along the first axis


def in_groups(w: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Return a weight w [out..., C] as x. Raise `ConfigError` for other bits than 8, 4 or 3."""
    if bits not in (3, 4, 8):
        raise ConfigError(f"weights can have 8, 4 or 3 bits, not {bits}")
    return np.ascontiguousarray(np.asarray(w, np.float32).reshape(-1, group).T)


def ends(bits: int) -> tuple[int, int]:
    """Return the least and the largest code without their offset."""
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def stored_scale(scales: np.ndarray, dtype: np.dtype = ml_dtypes.bfloat16) -> np.ndarray:
    """Return scales as a dtype has them, with 1 for those that are 0 there, in float32."""
    stored = scales.astype(dtype).astype(np.float32)
    return np.where(stored == 0, np.float32(1), stored)


def plain_grid(
    x: np.ndarray, bits: int, symmetric: bool, scale_dtype: np.dtype = ml_dtypes.bfloat16
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scale and the zero of each group by its extremes, float32 [groups]. See `quantize`."""
    low, high = ends(bits)
    if symmetric:
        extreme = np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], 0)[0]
        scales = np.abs(extreme) / np.float32(high) if bits == 8 else extreme / np.float32(low)
        return stored_scale(scales, scale_dtype), np.zeros_like(extreme)
    least, most = np.minimum(x.min(axis=0), 0), np.maximum(x.max(axis=0), 0)
    with np.errstate(over="ignore"):
        scales = (most - least) / np.float32(high - low)
    limit = np.float32(2.0 ** (128 - bits))  # up to it all multiples are finite
    scales = stored_scale(np.minimum(scales, limit), scale_dtype)
    return scales, np.clip(np.rint(-least / scales) + np.float32(low), low, high)


def codes_of(x: np.ndarray, scales: np.ndarray, zeros: np.ndarray, bits: int) -> np.ndarray:
    """Return the nearest codes without their offset, float32 [group, groups]."""
    return np.rint(np.clip(x / scales + zeros, *ends(bits)))


def packed(
    shape: tuple[int, ...],
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    bits: int,
    scale_dtype: np.dtype = ml_dtypes.bfloat16,
) -> QArray:
    """Return the QArray of a weight's shape [out..., C] that codes without their offset [group, groups] make up."""
    unsigned = (codes - np.float32(ends(bits)[0])).astype(np.uint8)
    scales, zeros = (
        None if part is None else part.astype(scale_dtype).reshape(*shape[:-1], -1) for part in (scales, zeros)
    )
    return QArray(pack(unsigned.T.reshape(shape), bits), scales, zeros, bits, shape[-1])


__all__ = ["GROUP", "GROUPS", "group_size", "quantize"]
