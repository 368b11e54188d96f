"""Quantised decoder layers: which parameters are quantised, and rounding of a whole layer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxserve.core.errors import ConfigError
from jaxserve.core.precision import BITS
from jaxserve.core.scale_groups import GROUP
from jaxserve.quantization.qarray import QArray
from jaxserve.quantization.scale_search import quantize_by_search

# The quantised parameters of a layer, and how many of their last axes are contracted. Norms, biases and the router of
# a mixture of experts are not quantised.
CONTRACTED: Mapping[str, int] = {
    "attention.qkv": 1,
    "attention.o": 3,
    "mlp.gate_up": 1,
    "mlp.down": 1,
    "mlp.experts_gate_up": 1,
    "mlp.experts_down": 1,
}

# All parameters of a layer, quantised or not, by their dotted path in its module.
Leaves = Mapping[str, np.ndarray | QArray]


@dataclass(frozen=True)
class LayerFormat:
    """The format of a quantised layer: that of its weights, and the dtype of its remaining parameters."""

    bits: int
    group: int  # inputs that share a scale where that divides; 0 for all inputs of an output
    symmetric: bool  # without zero points
    dtype: np.dtype


def bits_of(precision: str) -> int:
    """Return the bits of a quantised precision by its name. Raise `ConfigError` for any other name."""
    if precision not in BITS:
        raise ConfigError(f"precision {precision!r} is not quantised: choose from {', '.join(BITS)}")
    return BITS[precision]


def flat_inputs(name: str, w: np.ndarray) -> np.ndarray:
    """Return a weight [out..., C] with its contracted axes merged into one."""
    return w.reshape(*w.shape[: w.ndim - CONTRACTED[name]], -1)


def quantize_weights(
    leaves: Mapping[str, np.ndarray], quantize_weight: Callable[[str, np.ndarray], QArray], dtype: np.dtype
) -> dict[str, np.ndarray | QArray]:
    """Return a layer with each quantised parameter made by `quantize_weight`, and the remaining ones cast to `dtype`.

    `quantize_weight` gets the parameter's name and its weight [out..., C].
    """
    return {
        name: quantize_weight(name, flat_inputs(name, w)) if name in CONTRACTED else w.astype(dtype)
        for name, w in leaves.items()
    }


def round_layer(
    leaves: Mapping[str, np.ndarray], bits: int, *, group: int = GROUP, symmetric: bool = True
) -> dict[str, np.ndarray | QArray]:
    """Return a layer with its weights rounded with searched scales, and the remaining parameters unchanged."""

    def rounded(name: str, w: np.ndarray) -> QArray:
        return quantize_by_search(flat_inputs(name, w), bits, group=group, symmetric=symmetric)

    return {name: rounded(name, w) if name in CONTRACTED else w for name, w in leaves.items()}


def nbytes(leaves: Leaves) -> int:
    """Return the bytes of all parameters of a layer."""
    return sum(leaf.nbytes for leaf in leaves.values())
