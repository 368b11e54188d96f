"""A description of the machine that a measurement runs on, made with the standard library alone."""

import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jaxserve._version import __version__

FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers", "llama-cpp-python")
COMMAND_TIMEOUT_S = 10.0  # for git and nvidia-smi, which may hang on a broken driver
CHECKOUT = Path(__file__).resolve().parents[2]


def describe_environment() -> dict[str, str]:
    """Return CPU, cores, flags, memory, GPUs, system, versions, commit, load and date; unknown fields are left out."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or "unknown CPU",
        "cores": str(cores),
        "flags": _flags(),
        "memory": _memory(),
        "gpus": gpus(),
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "packages": packages(),
        "jaxserve": __version__,
        "commit": commit(CHECKOUT),
    }
    return {key: value for key, value in found.items() if value}


def packages() -> str:
    """Return the versions, in this interpreter, of the packages that measurements depend on."""
    return ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name)))


def gpus() -> str | None:
    """Return names, memory and driver of the NVIDIA GPUs, such as "2 x NVIDIA H200, 143771 MiB, driver 570".

    None if nvidia-smi is missing or fails.
    """
    listed = _output(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    if not listed:
        return None
    counts: dict[str, int] = {}
    for line in listed.splitlines():
        name, memory, driver = (field.strip() for field in line.rsplit(",", 2))
        text = f"{name}, {memory}, driver {driver}"
        counts[text] = counts.get(text, 0) + 1
    return "; ".join(text if count == 1 else f"{count} x {text}" for text, count in counts.items())


def commit(checkout: Path) -> str | None:
    """Return the commit of a git checkout, followed by " with changes" if tracked files differ from it.

    None if the folder is not a checkout, as for an installed package.
    """
    if not (checkout / ".git").exists():
        # git would look into parent folders and describe an unrelated repository.
        return None
    git = ["git", "-C", str(checkout)]
    found = _output([*git, "rev-parse", "--short=12", "HEAD"])
    if found is None:
        return None
    changed = _output([*git, "status", "--porcelain", "--untracked-files=no"])
    return f"{found} with changes" if changed else found


def _flags() -> str:
    """Return the CPU flags that decide how fast it multiplies."""
    flags = (_field("/proc/cpuinfo", "flags") or "").split()
    return " ".join(flag for flag in FLAGS if flag in flags)


def _memory() -> str | None:
    total = _field("/proc/meminfo", "MemTotal")
    return f"{int(total.split()[0]) / 2**20:.0f} GiB" if total else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _field(path: str, name: str) -> str | None:
    """Return the value of the first `name: value` line of a file under /proc."""
    if not Path(path).exists():
        return None
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _output(command: Sequence[str]) -> str | None:
    """Return what a program prints, or None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":
    for key, value in describe_environment().items():
        print(f"- {key}: {value}")  # noqa: T201
