"""Sampling of tokens, and log-probabilities, as custom calls.

The kernels are draw.cc and logprobs.cc. sampling/ops.py specifies both.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.kernels.native.library import DRAW, DRAW_ADJUSTED, LOGPROBS, targets

MAX_LANES = 16  # floats of the widest vector


def supported() -> bool:
    """Return whether the native library exists and has the calls for sampling."""
    return {DRAW, DRAW_ADJUSTED, LOGPROBS} <= targets()


def draw(logits: Array, packed: Array, newest: Array, *, max_lanes: int = MAX_LANES) -> tuple[Array, Array]:
    """Return tokens i32[R] of logits f32[R, V], drawn by the parameters i32[11, R], and the updated `newest`.

    `newest` i32[slots + 1] has the newest token of each slot. In a row with a NaN or an infinite maximum the token is
    -1, and 0 in `newest`. Rows of the spare slot, which is the last, draw nothing. `max_lanes` limits the floats of a
    vector, to 8 or 4.
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
    """Return tokens and `newest` as `draw` does, after penalties and sparse biases, and the updated `counts`.

    Penalties depend on the prompt's tokens `seen` bool[slots + 1, V] and the `counts` i32[slots + 1, V] of generated
    tokens. The biases f32[R, M] belong to `bias_ids` i32[R, M], of which the first negative one ends a row. `counts` is
    updated in place if the caller donates it.
    """
    results = (_like(logits.shape[:1]), _like(newest.shape), _like(counts.shape))
    call = jax.ffi.ffi_call(DRAW_ADJUSTED, results, input_output_aliases={4: 2})
    return call(logits, packed, newest, seen, counts, bias_ids, biases, max_lanes=np.int64(max_lanes))


def logprobs(
    logits: Array, tokens: Array, top: int, *, max_lanes: int = MAX_LANES
) -> tuple[Array, Array, Array, Array]:
    """Return log-probabilities f32[R] and ranks i32[R] of `tokens` i32[R] under logits f32[R, V], and the most likely.

    The third and fourth results are the `top` most likely tokens i32[R, top] and their log-probabilities f32[R, top];
    `top` is at most V. The most likely token has rank 1. All log-probabilities of a row with a NaN or an infinite
    maximum are NaN. `max_lanes` limits the floats of a vector, to 8 or 4. A token outside the vocabulary is an error
    when the step runs.
    """
    rows = len(tokens)
    results = (
        jax.ShapeDtypeStruct((rows,), jnp.float32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows, top), jnp.int32),
        jax.ShapeDtypeStruct((rows, top), jnp.float32),
    )
    return tuple(jax.ffi.ffi_call(LOGPROBS, results)(logits, tokens, max_lanes=np.int64(max_lanes)))


def _like(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
