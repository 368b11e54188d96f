"""What products call the functions and the type of `kernels.backend`."""

from jaxserve.kernels.backend import (
    KernelBackend as Choice,
    device_kind as device_kind,
    uses_pallas as uses_pallas,
)

__all__ = ["Choice", "device_kind", "uses_pallas"]
