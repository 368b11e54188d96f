"""Activation-aware weight quantisation (AWQ; Lin et al., MLSys 2024): weights of large inputs get finer steps.

A weight W is rounded as W diag(s), and its inputs are divided by s, which does not change the function. s is folded
into the parameters that produce the inputs: the weight of a norm, or the rows of the previous projection. A quantised
layer therefore has plain QArrays but its own norms, and a variant is the complete set of a layer's parameters.

The inputs of attention's output projection are not scaled: they are values in the KV cache, which all variants of a
layer share. The down projections of experts are rounded to the nearest, because their inputs are not observed.
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from jaxserve.calibration.activations import Inputs
from jaxserve.calibration.awq_search import best_scales, quantized
from jaxserve.checkpoint.rounding import round_weight
from jaxserve.quantization.layer import LayerFormat, Leaves, flat_inputs, quantize_weights
from jaxserve.quantization.qarray import QArray

Layer = dict[str, np.ndarray]
Search = Callable[[np.ndarray, Inputs], np.ndarray]
"""A search (weight [O, C], its inputs) -> s [C]."""

QKV, DOWN = "attention.qkv", "mlp.down"


def awq_layer(leaves: Mapping[str, np.ndarray], inputs: Mapping[str, Inputs], form: LayerFormat) -> Leaves:
    """Return a layer, given in float32, with its weights scaled and quantised to a format."""
    bits, group, symmetric = form.bits, form.group, form.symmetric
    search = partial(best_scales, bits=bits, group=group, symmetric=symmetric)
    layer, scales = scale_layer(leaves, inputs, search, form.dtype)

    def quantize_weight(name: str, w: np.ndarray) -> QArray:
        if name not in inputs:
            return round_weight(w, bits, group=group, symmetric=symmetric)
        mean_square = np.asarray(inputs[name].mean_square) / np.square(scales.get(name, 1))
        return quantized(w, mean_square, bits=bits, group=group, symmetric=symmetric)

    return quantize_weights(layer, quantize_weight, form.dtype)


def scale_layer(
    leaves: Mapping[str, np.ndarray], inputs: Mapping[str, Inputs], search: Search, dtype: np.dtype
) -> tuple[Layer, dict[str, np.ndarray]]:
    """Scale the weights of a layer without changing its function.

    Return the layer's new parameters, and for each scaled weight the scales by which its inputs are divided.
    """
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
    """Fold the inputs' scales into the norm in place, and return the scales as the norm's dtype represents them."""
    s = search(_matrix(name, layer[name]), inputs[name])
    folded = (layer[norm] / s).astype(dtype).astype(np.float32)
    s = np.divide(layer[norm], folded, out=np.ones_like(folded), where=folded != 0)
    layer[norm] = np.where(folded != 0, folded, layer[norm])
    layer[name] = layer[name] * s
    if "mlp.router" in layer and norm == "post_norm.weight":
        layer["mlp.router"] = layer["mlp.router"] * s
    return s


def _scale_up(layer: Layer, inputs: Mapping[str, Inputs], search: Search) -> np.ndarray:
    """Fold the scales of the down projection's inputs into the up projection, in place."""
    s = search(_matrix(DOWN, layer[DOWN]), inputs[DOWN])
    layer[DOWN] = layer[DOWN] * s
    for name in ("mlp.gate_up", "mlp.gate_up_bias"):
        if name in layer:
            gate_up = layer[name].copy()  # [N, 2, M, ...]
            gate_up[:, 1] /= s.reshape(gate_up.shape[0], gate_up.shape[2], *(1,) * (gate_up.ndim - 3))
            layer[name] = gate_up
    return s


def _matrix(name: str, w: np.ndarray) -> np.ndarray:
    """Return a weight as a matrix [O, C]."""
    flat = flat_inputs(name, w)
    return flat.reshape(-1, flat.shape[-1])
