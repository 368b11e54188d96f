"""What the machine has: memory of the host and of accelerators."""

import contextlib
import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> int:
    """Bytes of memory that this process may still take: what is available, within its control group's limit."""
    fields = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    available = int(fields.get("MemAvailable", "8388608 kB").split()[0]) * 1024
    for path in _CGROUP_LIMITS:
        limit = _read(path).strip()
        if limit.isdigit():
            available = min(available, int(limit))
    return available


def give_back_memory() -> None:
    """Gives memory back to the system that has been freed and is kept for later, much after compiling; with glibc."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_features() -> str:
    """The names of the instruction sets that the processor has, where the system tells them."""
    lines = _read("/proc/cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(("flags", "Features"))), "")


def device_memory(device: "jax.Device") -> int | None:
    """Bytes that JAX may take on an accelerator, or None where the device does not say."""
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
