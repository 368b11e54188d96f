"""The searches of AWQ (`awq`) for the scales of inputs and of groups that change a weight's outputs least.

Rounding errors of different inputs are nearly independent, so that the mean squared change of an output is a sum over
its inputs: the squared error of the weight times the mean square of the input. That needs no product with any inputs.

Axes: O outputs, C inputs, A candidates.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.calibration.activations import Inputs
from jaxserve.calibration.fake_quantization import Grid, as_qarray, codes, grouped, rounded, searched_grid
from jaxserve.quantization.qarray import QArray

STEPS = 10  # values of the scales' exponent that are tried
MAX_OUTPUTS = 256  # outputs of a weight on which candidates are compared
TINY = 1e-6


def best_scales(
    w: Float[np.ndarray, "O C"], inputs: Inputs, *, bits: int, group: int, symmetric: bool
) -> Float[np.ndarray, "C"]:
    """Return the scales s by which to divide the inputs, so that the outputs change least (AWQ, section 3.2).

    The candidates are s = a^x / m^y. a is the mean magnitude of each input, and m that of its weights relative to their
    groups. x goes from 0 to 1, and y is 0 or 1 - x. The first candidate is 1 everywhere, so that the result is never
    worse than without scales.
    """
    candidates = _candidates(w, np.asarray(inputs.mean_abs), group)
    some = w[np.unique(np.linspace(0, len(w) - 1, min(len(w), MAX_OUTPUTS)).astype(int))]
    return candidates[int(np.argmin(_losses(some, inputs.mean_square, candidates, bits, group, symmetric)))]


def _candidates(w: Float[np.ndarray, "O C"], activity: Float[np.ndarray, "C"], group: int) -> Float[np.ndarray, "A C"]:
    groups = np.abs(np.asarray(grouped(w, group)))
    magnitude = (groups / (groups.max(axis=-1, keepdims=True) + TINY)).mean(axis=0).reshape(-1)
    activity, magnitude = (np.maximum(x, TINY) for x in (activity, magnitude))
    exponents = np.arange(STEPS + 1) / STEPS
    candidates = [np.ones_like(activity)]
    candidates += [activity**x for x in exponents[1:]]
    candidates += [activity**x / magnitude ** (1 - x) for x in exponents[:-1]]
    return np.stack([s / np.sqrt(s.max() * s.min()) for s in candidates]).astype(np.float32)


@partial(jax.jit, static_argnums=(4, 5))
def _losses(
    w: Float[Array, "O C"], mean_square: Float[Array, "C"], candidates: Float[Array, "A C"], bits: Array, group: int,
    symmetric: bool,
) -> Float[Array, "A"]:  # fmt: skip
    """Return the squared change of the outputs for each candidate."""

    def loss(s: Float[Array, "C"]) -> Float[Array, ""]:
        change = rounded(grouped(w * s, group), bits, symmetric).reshape(w.shape) / s - w
        return (jnp.square(change) * mean_square).sum()

    return jax.lax.map(loss, candidates)


def quantized(
    w: Float[np.ndarray, "*out C"], mean_square: Float[np.ndarray, "C"], *, bits: int, group: int, symmetric: bool
) -> QArray:
    """Return a weight rounded with the scale for each group that changes the outputs least."""
    found = _quantized(w.reshape(-1, w.shape[-1]), mean_square, bits, group, symmetric)
    return as_qarray(w.shape, *found, bits, symmetric=symmetric)


@partial(jax.jit, static_argnums=(3, 4))
def _quantized(
    w: Float[Array, "O C"], mean_square: Float[Array, "C"], bits: Array, group: int, symmetric: bool
) -> tuple[Float[Array, "O G group"], Grid]:
    groups = grouped(w, group)
    grid = searched_grid(groups, grouped(mean_square, group), bits, symmetric)
    return codes(groups, grid.scales[..., None], grid.zeros[..., None], bits), grid
