"""The machine that jaxserve runs on: its memory and its processors."""

import contextlib
import ctypes
import math
import os
from pathlib import Path

from jaxserve.core import cgroups


def host_memory(root: Path = cgroups.ROOT) -> int:
    """Return the bytes of host memory that are available, or the limit of a control group if that is less."""
    fields = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    available = int(fields.get("MemAvailable", "8388608 kB").split()[0]) * 1024
    limit = cgroups.memory_limit(root)
    return available if limit is None else min(available, limit)


def trim_heap() -> None:
    """Return freed memory to the system. Otherwise glibc would hold it, and compiling frees a lot."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def allowed_processors() -> int:
    """Return how many processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_features() -> str:
    """Return the names of the processor's instruction sets, separated by spaces; "" if they are unknown."""
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(("flags", "Features"))), "")


def processors(root: Path = cgroups.ROOT) -> int:
    """Return how many threads may compute at once: the processors, or the quota of a control group if it is less."""
    limit = cgroups.cpu_limit(root)
    return allowed_processors() if limit is None else min(allowed_processors(), math.ceil(limit))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
