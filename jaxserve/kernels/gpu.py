"""Whether operations on a GPU go through the kernels of `pallas_kernels`."""

from typing import Literal

import jax

Choice = Literal["auto", "pallas", "xla"]
"""On a GPU: Pallas kernels where the device is one they are written for, always, or never. With all three, shapes that
a kernel does not take go through XLA."""

HOPPER = "9.0"  # compute capability: the kernels use instructions that other generations do not have


def uses_pallas(choice: Choice) -> bool:
    """What a choice means for JAX's default device."""
    return choice == "pallas" or (choice == "auto" and _is_hopper(jax.devices()[0]))


def _is_hopper(device: jax.Device) -> bool:
    return device.platform == "gpu" and getattr(device, "compute_capability", None) == HOPPER


def device_kind() -> str:
    """Of JAX's default device: what block sizes are looked up by."""
    return jax.devices()[0].device_kind
