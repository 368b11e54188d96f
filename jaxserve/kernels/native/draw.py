"""The next tokens of a step's rows as a custom call: draw.cc is the kernel, sampling/ops.py its specification."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.kernels.native.library import DRAW, DRAW_ADJUSTED, targets

MAX_LANES = 16


def supported() -> bool:
    """Whether the library is there."""
    return {DRAW, DRAW_ADJUSTED} <= targets()


def draw(logits: Array, packed: Array, newest: Array, *, max_lanes: int = MAX_LANES) -> tuple[Array, Array]:
    """Tokens i32[R] of logits f32[R, V] by the parameters i32[11, R], and `newest` i32[slots + 1] with them written in.

    The token of a row with logits that are NaN, or of which the largest is infinite, is -1, and 0 in `newest`. Rows of
    the spare slot, the last one, draw nothing. `max_lanes` limits the instruction set, to 8 or 4 floats.
    """
    call = jax.ffi.ffi_call(DRAW, (_like(logits.shape[:1]), _like(newest.shape)))
    return call(logits, packed, newest, max_lanes=np.int64(max_lanes))


def draw_adjusted(
    logits: Array,
    packed: Array,
    newest: Array,
    seen: Array,
    counts: Array,
    bias_ids: Array,
    biases: Array,
    *,
    max_lanes: int = MAX_LANES,
) -> tuple[Array, Array, Array]:
    """As `draw` of logits with penalties, by what each slot has `seen` bool[slots + 1, V] and its tokens' `counts`
    i32[slots + 1, V], and with sparse biases (i32[R, M] ids, the first negative one ends a row's; f32[R, M]). The third
    result are the counts with the tokens, in place if the caller donates them.
    """
    results = (_like(logits.shape[:1]), _like(newest.shape), _like(counts.shape))
    call = jax.ffi.ffi_call(DRAW_ADJUSTED, results, input_output_aliases={4: 2})
    return call(logits, packed, newest, seen, counts, bias_ids, biases, max_lanes=np.int64(max_lanes))


def _like(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
