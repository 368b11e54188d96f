"""Which implementations of an operation may run: what a `KernelBackend` means."""

import jax

from jaxserve.core.config import KernelBackend
from jaxserve.parallel.devices import devices

HOPPER = "9.0"  # compute capability: the Pallas kernels use instructions that other generations do not have


def uses_native(backend: KernelBackend) -> bool:
    """Whether native kernels may run on a CPU."""
    return backend in ("auto", "native")


def uses_pallas(backend: KernelBackend) -> bool:
    """Whether Pallas kernels may run on a GPU; with "auto", only if JAX's default device is one they are made for."""
    return backend == "pallas" or (backend == "auto" and _is_hopper(devices()[0]))


def device_kind() -> str:
    """Of JAX's default device: what block sizes are looked up by."""
    return devices()[0].device_kind


def _is_hopper(device: jax.Device) -> bool:
    return device.platform == "gpu" and getattr(device, "compute_capability", None) == HOPPER
