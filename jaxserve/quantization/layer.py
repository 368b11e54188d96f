"""A decoder layer's parameters, some of them in fewer bits: which are quantised, and the layer as a whole."""

from collections.abc import Callable, Mapping

import numpy as np

from jaxserve.core.errors import ConfigError
from jaxserve.core.precision import BITS
from jaxserve.quantization.qarray import QArray
from jaxserve.quantization.rounding import GROUP, quantize

CONTRACTED: Mapping[str, int] = {
    "attention.qkv": 1,
    "attention.o": 3,
    "mlp.gate_up": 1,
    "mlp.down": 1,
    "mlp.experts_gate_up": 1,
    "mlp.experts_down": 1,
}
"""The parameters of a layer that are quantised, and over how many of their last axes they are contracted.

Norms, biases and the router of a mixture of experts stay as they are.
"""

Leaves = Mapping[str, np.ndarray | QArray]
"""A layer's parameters by their dotted path in its module. A variant of a layer is all of them, quantised or not."""


def bits_of(precision: str) -> int:
    """The bits of a precision's name. Raises `ConfigError` for a name that has none."""
    if precision not in BITS:
        raise ConfigError(f"precision {precision!r} is none that weights are quantised to: {', '.join(BITS)}")
    return BITS[precision]


def flat_inputs(name: str, w: np.ndarray) -> np.ndarray:
    """The weight with its contracted axes as one: [out..., C]."""
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
    """The layer with its weights rounded to the nearest, without data; the other parameters as they are."""
    return {
        name: quantize(flat_inputs(name, w), bits, group=group, symmetric=symmetric) if name in CONTRACTED else w
        for name, w in leaves.items()
    }


def nbytes(leaves: Leaves) -> int:
    """Bytes of all parameters of a layer."""
    return sum(leaf.nbytes for leaf in leaves.values())
