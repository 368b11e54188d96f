"""Rounding of a block's parameters to the nearest value in fewer bits, without calibration data."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxserve.checkpoint.values import largest_magnitude
from jaxserve.core.block_names import layer_name
from jaxserve.core.config import ModelConfig
from jaxserve.core.errors import CheckpointError
from jaxserve.core.machine import processors
from jaxserve.core.scale_groups import group_size, sentence
from jaxserve.kernels import native
from jaxserve.models import abstract_block
from jaxserve.quantization import QArray
from jaxserve.quantization.layer import CONTRACTED, LayerFormat, flat_inputs

# Weights that a thread quantises at once: few temporaries, which stay in the cache.
CHUNK = 1 << 17
MAX_THREADS = 16


def round_block(
    padded: ModelConfig, block_id: str, arrays: Mapping[str, np.ndarray], precision: str
) -> dict[str, np.ndarray | QArray]:
    """Return a block's parameters, with a QArray for each one that is quantised in this precision.

    Raise `CheckpointError`, which names the parameter, for one that holds NaN or infinity.
    """
    _, variables = abstract_block(padded, block_id, precision)
    rounded: dict[str, np.ndarray | QArray] = {}
    for name, array in arrays.items():
        template = variables[name].get_value()
        if isinstance(template, QArray):
            check_finite(f"{block_id}.{name}", array, precision)
            rounded[name] = round_weight(array.reshape(template.shape), template.bits, group=template.group)
        else:
            rounded[name] = array
    return rounded


def rounded_layer(leaves: Mapping[str, np.ndarray], form: LayerFormat) -> dict[str, np.ndarray | QArray]:
    """Return a layer with its weights rounded to a format, and the remaining parameters unchanged.

    Raise `CheckpointError`, which names the parameter, for a weight that holds NaN or infinity.
    """

    def rounded(name: str, w: np.ndarray) -> QArray:
        check_finite(name, w, f"int{form.bits}")
        return round_weight(flat_inputs(name, w), form.bits, group=form.group, symmetric=form.symmetric)

    return {name: rounded(name, w) if name in CONTRACTED else w for name, w in leaves.items()}


def groups_by_weight(config: ModelConfig, precision: str) -> dict[str, tuple[int, int]]:
    """Return, by name, the inputs of a layer's rounded weights and how many of them share a scale."""
    _, variables = abstract_block(config, layer_name(0), precision)
    weights = {name: variable.get_value() for name, variable in variables.items()}
    return {name: (weight.size, weight.group) for name, weight in weights.items() if isinstance(weight, QArray)}


def other_groups(config: ModelConfig, taken: Mapping[str, int], wanted: int) -> list[str]:
    """Return sentences on the groups that are taken in each precision where `wanted` does not divide a weight's inputs.

    `taken` has what `group_size` takes. Precisions with the same groups share a sentence.
    """
    precisions: dict[str, list[str]] = {}
    for precision, group in taken.items():
        groups = {
            name: (size, group_size(size, group)) for name, (size, _) in groups_by_weight(config, precision).items()
        }
        if any(size % wanted for size, _ in groups.values() if wanted):
            precisions.setdefault(sentence(groups, wanted), []).append(precision)
    return [f"{', '.join(names)}: {said}" for said, names in precisions.items()]


def check_finite(name: str, array: np.ndarray, precision: str) -> None:
    """Raise `CheckpointError` for a weight that holds NaN or infinity, which no code of few bits can mean."""
    if not np.isfinite(largest_magnitude(array)):
        said = f"{name} holds NaN or infinity: it cannot be rounded to {precision}"
        raise CheckpointError(f"{said} (precision, layer_precision, variants)")


def round_weight(w: np.ndarray, bits: int, *, group: int, symmetric: bool = True) -> QArray:
    """Return a weight [out..., C] as `quantize_by_search` defines it, computed by all processors."""
    *out, size = w.shape
    rows = w.reshape(-1, size)
    step = max(CHUNK // size, 1)

    def part(start: int) -> QArray:
        return native.quantize_by_search(rows[start : start + step], bits, group=group, symmetric=symmetric)

    native.targets()  # loaded once, before threads ask for it
    with ThreadPoolExecutor(min(processors(), MAX_THREADS)) as pool:
        parts = list(pool.map(part, range(0, len(rows), step)))
    codes, scales, zeros = (
        np.concatenate(leaves).reshape(*out, -1) if leaves[0] is not None else None
        for leaves in zip(*((part.codes, part.scales, part.zeros) for part in parts), strict=True)
    )
    return QArray(codes, scales, zeros, bits, size)
