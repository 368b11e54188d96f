"""What a measurement ran on, as a script sees it."""

import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers", "llama-cpp-python")


def describe() -> dict[str, str]:
    """CPU, cores, flags, memory, versions, load and date; what is not there is left out."""
    cpu = _field("/proc/cpuinfo", "model name") or platform.processor() or "unknown CPU"
    flags = (_field("/proc/cpuinfo", "flags") or "").split()
    memory = _field("/proc/meminfo", "MemTotal")
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu,
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "flags": " ".join(flag for flag in FLAGS if flag in flags),
        "memory": f"{int(memory.split()[0]) / 2**20:.0f} GiB" if memory else "unknown",
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "packages": packages(),
    }


def packages() -> str:
    """The versions, in this interpreter, of what the measurements depend on."""
    return ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name)))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _field(path: str, name: str) -> str | None:
    """The value of the first `name: value` line of a file under /proc."""
    if not Path(path).exists():
        return None
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


if __name__ == "__main__":
    for key, value in describe().items():
        print(f"- {key}: {value}")
