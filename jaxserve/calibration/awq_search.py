"""The searches of AWQ (`awq`) for the scales and the ranges that change a weight's outputs least.

Axes: O outputs, C inputs, R rows of inputs, A candidates.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.calibration.activations import Inputs
from jaxserve.calibration.fake_quantization import grouped, rounded

STEPS = 20  # values of the scales' exponent that are tried
CLIPS = tuple(1 - 0.05 * step for step in range(1, 11))  # shares of a group's range that are tried in addition to 1
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
    return candidates[int(np.argmin(_losses(w, inputs.rows, candidates, bits, group, symmetric)))]


def _candidates(w: Float[np.ndarray, "O C"], activity: Float[np.ndarray, "C"], group: int) -> Float[np.ndarray, "A C"]:
    groups = np.abs(np.asarray(grouped(w, group)))
    magnitude = (groups / (groups.max(axis=-1, keepdims=True) + TINY)).mean(axis=0).reshape(-1)
    activity, magnitude = (np.maximum(x, TINY) for x in (activity, magnitude))
    exponents = np.arange(STEPS + 1) / STEPS
    candidates = [np.ones_like(activity)]
    candidates += [activity**x for x in exponents[1:]]
    candidates += [activity**x / magnitude ** (1 - x) for x in exponents[:-1]]
    return np.stack([s / np.sqrt(s.max() * s.min()) for s in candidates]).astype(np.float32)


@partial(jax.jit, static_argnums=(3, 4, 5))
def _losses(
    w: Float[Array, "O C"], rows: Float[Array, "R C"], candidates: Float[Array, "A C"], bits: int, group: int,
    symmetric: bool,
) -> Float[Array, "A"]:  # fmt: skip
    """Return the mean squared change of the outputs for each candidate."""

    def loss(s: Float[Array, "C"]) -> Float[Array, ""]:
        change = rounded(grouped(w * s, group), bits, symmetric).reshape(w.shape) / s - w
        return jnp.square(rows @ change.T).mean()

    return jax.lax.map(loss, candidates)


def clipped(
    w: Float[np.ndarray, "*out C"], rows: Float[Array, "R C"], *, bits: int, group: int, symmetric: bool
) -> Float[np.ndarray, "*out C"]:
    """Return the weight with each group's range narrowed to the share that changes its part of the outputs least."""
    return np.asarray(_clipped(w.reshape(-1, w.shape[-1]), rows, bits, group, symmetric)).reshape(w.shape)


@partial(jax.jit, static_argnums=(2, 3, 4))
def _clipped(
    w: Float[Array, "O C"], rows: Float[Array, "R C"], bits: int, group: int, symmetric: bool
) -> Float[Array, "O C"]:
    groups, parts = grouped(w, group), grouped(rows, group)
    gram = jnp.einsum("rgi,rgj->gij", parts, parts)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)

    def attempt(share: Array | float) -> tuple[Array, Array]:
        narrowed = jnp.clip(groups, low * share, high * share)
        change = rounded(narrowed, bits, symmetric) - groups
        return narrowed, jnp.einsum("ogi,gij,ogj->og", change, gram, change)

    def better(best: tuple[Array, Array], share: Array) -> tuple[tuple[Array, Array], None]:
        narrowed, loss = attempt(share)
        wins = loss < best[1]
        return (jnp.where(wins[..., None], narrowed, best[0]), jnp.where(wins, loss, best[1])), None

    (best, _), _ = jax.lax.scan(better, attempt(1.0), jnp.array(CLIPS))
    return best.reshape(w.shape)
