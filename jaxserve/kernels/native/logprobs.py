"""Log-probabilities of rows of logits as a custom call: logprobs.cc is the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.kernels.native.draw import MAX_LANES
from jaxserve.kernels.native.library import LOGPROBS


def logprobs(
    logits: Array, tokens: Array, top: int, *, max_lanes: int = MAX_LANES
) -> tuple[Array, Array, Array, Array]:
    """Of `tokens` i32[R] under logits f32[R, V] their log-probabilities f32[R] and ranks i32[R], 1 for the most likely;
    and the `top` most likely tokens i32[R, top], at most V, with theirs f32[R, top].

    All are NaN in a row with logits that are NaN, or of which the largest is infinite. `max_lanes` limits the
    instruction set, to 8 or 4 floats. A token that is not in the vocabulary is an error when the step runs.
    """
    rows = len(tokens)
    results = (
        jax.ShapeDtypeStruct((rows,), jnp.float32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows, top), jnp.int32),
        jax.ShapeDtypeStruct((rows, top), jnp.float32),
    )
    return tuple(jax.ffi.ffi_call(LOGPROBS, results)(logits, tokens, max_lanes=np.int64(max_lanes)))
