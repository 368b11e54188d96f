"""The machine that jaxserve runs on: its memory and its processors."""

import contextlib
import ctypes
import math
import os
from pathlib import Path

from jaxserve.core import cgroups


def host_memory(root: Path = cgroups.ROOT) -> int:
    """Return the bytes of host memory that are available, or what a control group leaves if that is less."""
    available = _meminfo("MemAvailable", root) or 8 << 30
    left = cgroups.memory_left(root)
    return available if left is None else min(available, left)


def host_memory_limit(root: Path = cgroups.ROOT) -> tuple[int, str] | None:
    """Return the bytes of host memory that no process here can exceed, and what sets this limit; None if unknown."""
    limits = (
        (_meminfo("MemTotal", root), "the memory of this machine"),
        (cgroups.memory_limit(root), "the limit of this process's control group"),
    )
    return min(((size, name) for size, name in limits if size is not None), default=None)


def resident_bytes(pid: int | str = "self") -> int:
    """Return the memory that a process takes, without files that it shares; 0 if it is unknown."""
    fields = _read(Path(f"/proc/{pid}/statm")).split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 2 else 0


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


def _meminfo(name: str, root: Path) -> int | None:
    """Return a field of /proc/meminfo in bytes, or None if there is none."""
    fields = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    return int(fields[name].split()[0]) * 1024 if name in fields else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
