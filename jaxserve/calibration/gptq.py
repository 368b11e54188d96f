"""GPTQ (Frantar et al., ICLR 2023): rounds weights input by input, and corrects those of later inputs for each error.

H is the mean of x xᵀ over the inputs, and U the upper Cholesky factor of its inverse. After input i of a row of weights
was rounded with an error e, the outputs change least if w[j] -= e / U[i, i] * U[i, j] for every j > i (section 3.3,
step 3).

Inputs are rounded in the order of their mean squares, the largest first, because later ones take over the errors. The
groups that share a scale stay those of neighbouring inputs, which the kernels read, and their scales are searched
before the first input is rounded.

The down projections of experts are rounded to the nearest, because their inputs are not observed.
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.calibration.activations import Inputs
from jaxserve.calibration.fake_quantization import Grid, as_qarray, codes, grouped, searched_grid
from jaxserve.checkpoint.rounding import round_weight
from jaxserve.quantization.layer import LayerFormat, Leaves, quantize_weights
from jaxserve.quantization.qarray import QArray

DAMPING = 0.01  # the share of H's mean diagonal that is added to its diagonal
BLOCK = 64  # inputs after which the weights of all later inputs are corrected


def gptq_layer(leaves: Mapping[str, np.ndarray], inputs: Mapping[str, Inputs], form: LayerFormat) -> Leaves:
    """Return a layer, given in float32, with its weights quantised to a format. The inputs must have a `gram`."""
    bits, group, symmetric = form.bits, form.group, form.symmetric

    def quantize_weight(name: str, w: np.ndarray) -> QArray:
        if name not in inputs:
            return round_weight(w, bits, group=group, symmetric=symmetric)
        return compensated(w, np.asarray(inputs[name].gram), bits, group=group, symmetric=symmetric)

    return quantize_weights(leaves, quantize_weight, form.dtype)


def cholesky_of_inverse(gram: Float[np.ndarray, "C C"]) -> Float[np.ndarray, "C C"]:
    """Return the upper triangular U for which Uᵀ U is the inverse of the damped H."""
    wide = gram.astype(np.float64)
    damping = DAMPING * (wide.diagonal().mean() or 1.0)
    inverse = np.linalg.inv(wide + np.diag(np.full(len(wide), damping)))
    return np.linalg.cholesky((inverse + inverse.T) / 2).T.astype(np.float32)


def compensated(
    w: Float[np.ndarray, "*out C"], gram: Float[np.ndarray, "C C"], bits: int, *, group: int, symmetric: bool
) -> QArray:
    """Return the weight as a QArray, where less important inputs compensate for the errors of the others."""
    order = np.argsort(-gram.diagonal(), kind="stable")
    factor = cholesky_of_inverse(gram[np.ix_(order, order)])
    found = _solve(w.reshape(-1, w.shape[-1]), gram.diagonal(), order, factor, bits, group, symmetric)
    return as_qarray(w.shape, *found, bits, symmetric=symmetric)


@partial(jax.jit, static_argnums=(5, 6))
def _solve(
    w: Float[Array, "O C"], mean_square: Float[Array, "C"], order: Array, factor: Float[Array, "C C"], bits: Array,
    group: int, symmetric: bool,
) -> tuple[Float[Array, "O C"], Grid]:  # fmt: skip
    """Return signed codes (as floats), scales and zero points."""
    outputs, inputs = w.shape
    groups = grouped(w, group)
    grid = searched_grid(groups, grouped(mean_square, group), bits, symmetric)
    scales, zeros = (jnp.repeat(x, groups.shape[-1], axis=1)[:, order] for x in grid)
    block = BLOCK if inputs % BLOCK == 0 else inputs

    def one_block(w: Array, start: Array) -> tuple[Array, Array]:
        part, scale, zero = (jax.lax.dynamic_slice(x, (0, start), (outputs, block)) for x in (w, scales, zeros))
        rows = jax.lax.dynamic_slice(factor, (start, 0), (block, inputs))
        square = jax.lax.dynamic_slice(rows, (0, start), (block, block))

        def one_input(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            part, chosen, errors = state
            column, s, z = (jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False) for x in (part, scale, zero))
            code = codes(column, s, z, bits)
            error = (column - (code - z) * s) / square[i, i]
            part -= error[:, None] * square[i]  # zero before i
            return part, chosen.at[:, i].set(code), errors.at[:, i].set(error)

        empty = jnp.zeros_like(part)
        _, chosen, errors = jax.lax.fori_loop(0, block, one_input, (part, empty, empty))
        return w - errors @ rows, chosen

    _, chosen = jax.lax.scan(one_block, w[:, order], jnp.arange(0, inputs, block))
    chosen = chosen.transpose(1, 0, 2).reshape(outputs, inputs)
    return jnp.zeros_like(chosen).at[:, order].set(chosen), grid
