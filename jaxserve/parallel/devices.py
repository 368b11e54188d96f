"""The devices that JAX computes on."""

import os

import jax

from jaxserve.core.errors import ConfigError

PLATFORM_CHOICES = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")  # environment variables

_started_in: dict[str, int] = {}  # the process that has started JAX, once there is one


def devices() -> tuple[jax.Device, ...]:
    """Return the devices that JAX computes on.

    Raise `ConfigError` if JAX cannot start, or has started in the process of which this one is a fork: it would wait
    for ever for threads that a fork lacks.
    """
    if os.getpid() != _started_in.setdefault("process", os.getpid()):
        raise ConfigError(
            "this process is a fork of one that has opened a model, whose threads it lacks: start it in another way, "
            'such as multiprocessing.get_context("spawn").Process'
        )
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
