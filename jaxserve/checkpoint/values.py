"""Checks of a checkpoint's tensors for values that a model cannot compute with."""

import logging

import numpy as np

from jaxserve.core.errors import CheckpointError

log = logging.getLogger(__name__)


def check_values(name: str, tensor: np.ndarray, dtype: np.dtype) -> None:
    """Warn of NaN and infinity in a tensor. Raise `CheckpointError` if a finite value overflows in `dtype`.

    `name` names the file and the tensor in messages.
    """
    largest = largest_magnitude(tensor)
    if not np.isfinite(largest):
        log.warning("%s holds NaN or infinity: requests for which the model uses these values end with an error", name)
        largest = np.max(np.abs(tensor), where=np.isfinite(tensor), initial=0)
    with np.errstate(over="ignore"):
        overflows = np.isinf(largest.astype(dtype))
    if overflows:
        with np.errstate(over="ignore"):
            fits = np.isfinite(largest.astype(np.float32))
        advice = ": run it with --dtype bfloat16 or float32" if fits and dtype == np.float16 else ""
        raise CheckpointError(
            f"{name} holds a value of magnitude {float(largest):g}, which {dtype} cannot represent{advice}"
        )


def largest_magnitude(tensor: np.ndarray) -> np.ndarray:
    """Return the largest absolute value of a tensor of floats as a scalar array, not finite if any value is not.

    The bits are compared as integers, which numpy does at the speed of memory. Floats without their sign sort like
    their bits.
    """
    size = tensor.dtype.itemsize
    signed, unsigned = tensor.view(f"i{size}"), tensor.view(f"u{size}")
    sign = 1 << (8 * size - 1)
    positive, negative = int(signed.max(initial=0)), int(unsigned.max(initial=0)) - sign
    return np.array(max(positive, negative), f"i{size}").view(tensor.dtype)
