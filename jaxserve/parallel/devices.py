"""The devices that JAX computes on."""

import os

import jax

from jaxserve.core.errors import ConfigError

PLATFORM_CHOICES = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")  # environment variables


def devices() -> tuple[jax.Device, ...]:
    """Return the devices that JAX computes on. Raise `ConfigError` if JAX cannot start."""
    try:
        return tuple(jax.devices())
    except (RuntimeError, AssertionError) as error:
        # JAX asserts, without a message, that one of the requested platforms could start.
        reason = str(error) or "none of the requested platforms is available"
        asked = [f" ({name}={os.environ[name]})" for name in PLATFORM_CHOICES if os.environ.get(name)]
        raise ConfigError(f"JAX cannot start: {reason}{''.join(asked)}") from error


def device_memory(device: jax.Device) -> int | None:
    """Return the bytes that JAX may use on an accelerator, or None if the device does not report them."""
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")
