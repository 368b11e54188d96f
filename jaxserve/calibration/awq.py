"""Activation-aware weight quantisation (Lin et al., MLSys 2024): inputs that are large get finer steps.

A weight W is rounded as W diag(s), and its inputs are divided by s, which leaves the function as it was. s is folded
into what makes the inputs: a norm's weight, or the rows of the projection before. So a quantised layer has plain
QArrays, but norms of its own: a variant is the complete set of a layer's parameters.

The output projection of attention keeps its inputs: they are made of the values in the KV cache, which all variants of
a layer share. Experts' second weights are rounded to the nearest: what reaches each of them is not observed.
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from jaxserve.calibration.activations import Inputs
from jaxserve.calibration.awq_search import best_scales, clipped
from jaxserve.quantization.layer import Leaves, flat_inputs, quantize_weights
from jaxserve.quantization.qarray import QArray
from jaxserve.quantization.rounding import quantize

Layer = dict[str, np.ndarray]
Search = Callable[[np.ndarray, Inputs], np.ndarray]
"""(weight [O, C], its inputs) -> s [C]."""

QKV, DOWN = "attention.qkv", "mlp.down"


def awq_layer(
    leaves: Mapping[str, np.ndarray],
    inputs: Mapping[str, Inputs],
    bits: int,
    *,
    group: int,
    symmetric: bool,
    dtype: np.dtype,
) -> Leaves:
    """A layer, given in float32, with its weights scaled, clipped and quantised; the other parameters in `dtype`."""
    layer, scales = scale_layer(
        leaves, inputs, partial(best_scales, bits=bits, group=group, symmetric=symmetric), dtype
    )

    def quantize_weight(name: str, w: np.ndarray) -> QArray:
        if name in inputs:
            w = clipped(w, inputs[name].rows / scales.get(name, 1), bits=bits, group=group, symmetric=symmetric)
        return quantize(w, bits, group=group, symmetric=symmetric)

    return quantize_weights(layer, quantize_weight, dtype)


def scale_layer(
    leaves: Mapping[str, np.ndarray], inputs: Mapping[str, Inputs], search: Search, dtype: np.dtype
) -> tuple[Layer, dict[str, np.ndarray]]:
    """The same function with other parameters, and by what the inputs of some weights are divided now."""
    layer = dict(leaves)
    up = "mlp.experts_gate_up" if "mlp.experts_gate_up" in layer else "mlp.gate_up"
    scales = {
        QKV: _scale_normed(layer, inputs, search, dtype, "input_norm.weight", QKV),
        up: _scale_normed(layer, inputs, search, dtype, "post_norm.weight", up),
    }
    if DOWN in layer:
        scales[DOWN] = _scale_up(layer, inputs, search)
    return layer, scales


def _scale_normed(
    layer: Layer, inputs: Mapping[str, Inputs], search: Search, dtype: np.dtype, norm: str, name: str
) -> np.ndarray:
    """Folds the inputs' scales into the norm. Those are taken that its dtype holds exactly. Mutates `layer`."""
    s = search(_matrix(name, layer[name]), inputs[name])
    folded = (layer[norm] / s).astype(dtype).astype(np.float32)
    s = np.divide(layer[norm], folded, out=np.ones_like(folded), where=folded != 0)
    layer[norm] = np.where(folded != 0, folded, layer[norm])
    layer[name] = layer[name] * s
    if "mlp.router" in layer and norm == "post_norm.weight":
        layer["mlp.router"] = layer["mlp.router"] * s
    return s


def _scale_up(layer: Layer, inputs: Mapping[str, Inputs], search: Search) -> np.ndarray:
    """Folds the scales of down's inputs into the up projection. Mutates `layer`."""
    s = search(_matrix(DOWN, layer[DOWN]), inputs[DOWN])
    layer[DOWN] = layer[DOWN] * s
    for name in ("mlp.gate_up", "mlp.gate_up_bias"):
        if name in layer:
            gate_up = layer[name].copy()  # [N, 2, M, ...]
            gate_up[:, 1] /= s.reshape(gate_up.shape[0], gate_up.shape[2], *(1,) * (gate_up.ndim - 3))
            layer[name] = gate_up
    return s


def _matrix(name: str, w: np.ndarray) -> np.ndarray:
    """[O, C]."""
    flat = flat_inputs(name, w)
    return flat.reshape(-1, flat.shape[-1])
