"""Log-probabilities of rows of logits as a custom call. The kernel is logprobs.cc."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.kernels.native.draw import MAX_LANES
from jaxserve.kernels.native.library import LOGPROBS


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
