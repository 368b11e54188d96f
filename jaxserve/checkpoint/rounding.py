"""Rounding of a block's parameters to the nearest value in fewer bits, without calibration data."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxserve.core.config import ModelConfig
from jaxserve.core.machine import processors
from jaxserve.models import abstract_block
from jaxserve.quantization import QArray
from jaxserve.quantization.rounding import quantize

# Weights that a thread quantises at once. The temporaries, about 30 bytes per weight, stay in the cache.
CHUNK = 1 << 17
MAX_THREADS = 16


def round_block(
    padded: ModelConfig, block_id: str, arrays: Mapping[str, np.ndarray], precision: str
) -> dict[str, np.ndarray | QArray]:
    """Return a block's parameters, with a QArray for each one that is quantised in this precision."""
    _, variables = abstract_block(padded, block_id, precision)
    templates = {name: variable.get_value() for name, variable in variables.items()}
    return {
        name: round_weight(array, templates[name]) if isinstance(templates[name], QArray) else array
        for name, array in arrays.items()
    }


def round_weight(w: np.ndarray, template: QArray) -> QArray:
    """Return a weight [out..., c...] as the nearest symmetric QArray of the template's shape, bits and group."""
    *out, size = template.shape
    rows = w.reshape(-1, size)
    codes = np.empty((len(rows), template.codes.shape[-1]), template.codes.dtype)
    scales = np.empty((len(rows), template.scales.shape[-1]), template.scales.dtype)
    step = max(CHUNK // size, 1)

    def fill(start: int) -> None:
        part = quantize(rows[start : start + step], template.bits, group=template.group, scale_dtype=scales.dtype)
        codes[start : start + step], scales[start : start + step] = part.codes, part.scales

    with ThreadPoolExecutor(min(processors(), MAX_THREADS)) as pool:
        for _ in pool.map(fill, range(0, len(rows), step)):
            pass
    return QArray(codes.reshape(*out, -1), scales.reshape(*out, -1), None, template.bits, size)
