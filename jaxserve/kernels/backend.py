"""The implementations of an operation that a `KernelBackend` allows."""

import jax

from jaxserve.core.config import KernelBackend
from jaxserve.parallel.devices import devices

# The compute capability of GPUs for which the Pallas kernels are made: they use instructions of this generation only.
HOPPER = "9.0"


def uses_native(backend: KernelBackend) -> bool:
    """Return whether native kernels may run on a CPU."""
    return backend in ("auto", "native")


def uses_pallas(backend: KernelBackend) -> bool:
    """Return whether Pallas kernels may run on a GPU; with "auto" JAX's default device must be a Hopper GPU."""
    return backend == "pallas" or (backend == "auto" and _is_hopper(devices()[0]))


def device_kind() -> str:
    """Return the kind of JAX's default device, which selects block sizes."""
    return devices()[0].device_kind


def runs_on_gpu() -> bool:
    """Return whether JAX's default device is a GPU."""
    return devices()[0].platform == "gpu"


def _is_hopper(device: jax.Device) -> bool:
    return device.platform == "gpu" and getattr(device, "compute_capability", None) == HOPPER
