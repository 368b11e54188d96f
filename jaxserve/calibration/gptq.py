"""GPTQ (Frantar et al., ICLR 2023): rounds weights input by input, and corrects those of later inputs for each error.

H is the mean of x xᵀ over the inputs, and U the upper Cholesky factor of its inverse. After input i of a row of weights
was rounded with an error e, the outputs change least if w[j] -= e / U[i, i] * U[i, j] for every j > i (section 3.3,
step 3). The scale of a group is computed from its weights when the group is reached. Inputs keep their order, in which
the kernels read them.

The down projections of experts are rounded to the nearest, because their inputs are not observed.
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float

from jaxserve.calibration.activations import Inputs
from jaxserve.calibration.fake_quantization import codes, scales_and_zeros
from jaxserve.quantization.layer import LayerFormat, Leaves, quantize_weights
from jaxserve.quantization.packing import pack
from jaxserve.quantization.qarray import QArray
from jaxserve.quantization.rounding import group_size, quantize

DAMPING = 0.01  # the share of H's mean diagonal that is added to its diagonal


def gptq_layer(leaves: Mapping[str, np.ndarray], inputs: Mapping[str, Inputs], form: LayerFormat) -> Leaves:
    """Return a layer, given in float32, with its weights quantised to a format. The inputs must have a `gram`."""
    bits, group, symmetric = form.bits, form.group, form.symmetric

    def quantize_weight(name: str, w: np.ndarray) -> QArray:
        if name not in inputs:
            return quantize(w, bits, group=group, symmetric=symmetric)
        factor = cholesky_of_inverse(np.asarray(inputs[name].gram))
        return compensated(w, factor, bits, group=group, symmetric=symmetric)

    return quantize_weights(leaves, quantize_weight, form.dtype)


def cholesky_of_inverse(gram: Float[np.ndarray, "C C"]) -> Float[np.ndarray, "C C"]:
    """Return the upper triangular U for which Uᵀ U is the inverse of the damped H."""
    wide = gram.astype(np.float64)
    diagonal = wide.diagonal()
    damping = DAMPING * (diagonal.mean() or 1.0)
    inverse = np.linalg.inv(wide + np.diag(np.full(len(wide), damping)))
    return np.linalg.cholesky((inverse + inverse.T) / 2).T.astype(np.float32)


def compensated(
    w: Float[np.ndarray, "*out C"], factor: Float[np.ndarray, "C C"], bits: int, *, group: int, symmetric: bool
) -> QArray:
    """Return the weight as a QArray, where later inputs compensate for the errors of earlier ones."""
    size = w.shape[-1]
    group = size if group == 0 else group_size(size, group)
    signed, scales, zeros = (np.asarray(x) for x in _solve(w.reshape(-1, size), factor, bits, group, symmetric))
    unsigned = (signed + (1 << (bits - 1))).astype(np.uint8).reshape(w.shape)
    narrow = [x.astype(ml_dtypes.bfloat16).reshape(*w.shape[:-1], -1) for x in (scales, zeros)]
    return QArray(pack(unsigned, bits), narrow[0], None if symmetric else narrow[1], bits, size)


@partial(jax.jit, static_argnums=(2, 3, 4))
def _solve(
    w: Float[Array, "O C"], factor: Float[Array, "C C"], bits: int, group: int, symmetric: bool
) -> tuple[Float[Array, "O C"], Float[Array, "O G"], Float[Array, "O G"]]:
    """Return signed codes (as floats), scales and zero points."""
    outputs, inputs = w.shape

    def one_group(w: Array, start: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        part = jax.lax.dynamic_slice(w, (0, start), (outputs, group))
        rows = jax.lax.dynamic_slice(factor, (start, 0), (group, inputs))
        square = jax.lax.dynamic_slice(rows, (0, start), (group, group))
        scales, zeros = scales_and_zeros(part, bits, symmetric)

        def one_input(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            part, chosen, errors = state
            column = jax.lax.dynamic_index_in_dim(part, i, axis=1, keepdims=False)
            code = codes(column, scales, zeros, bits)
            error = (column - (code - zeros) * scales) / square[i, i]
            part -= error[:, None] * square[i]  # zero before i
            return part, chosen.at[:, i].set(code), errors.at[:, i].set(error)

        empty = jnp.zeros_like(part)
        _, chosen, errors = jax.lax.fori_loop(0, group, one_input, (part, empty, empty))
        return w - errors @ rows, (chosen, scales, zeros)

    _, (chosen, scales, zeros) = jax.lax.scan(one_group, w, jnp.arange(0, inputs, group))
    return chosen.transpose(1, 0, 2).reshape(outputs, inputs), scales.T, zeros.T
