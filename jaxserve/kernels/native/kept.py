"""Files that keep what was found out about a native library on a processor, so that later starts know it.

There is one for each library and processor, because several machines may share a folder: beside the library, or in the
user's cache if that folder cannot be written.
"""

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxserve.kernels.native.build import cache_folder, replacing

# What identifies a processor in /proc/cpuinfo, on x86-64 and on arm64.
IDENTITY = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features"),
)


def processor() -> str:
    """Return the model and the instruction sets of this machine's first processor."""
    try:
        with open("/proc/cpuinfo") as file:  # the entries of other processors take time
            text = file.read(8192).partition("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.system()}"
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return "\n".join(f"{name.strip()}:{value}" for name, value in fields.items() if name.strip() in IDENTITY)


def read(library: Path, identity: str, what: str = "") -> Iterator[dict[str, Any]]:
    """Yield what files keep of this very library and processor; nothing of files that are damaged or of others."""
    for file in _files(library, identity, what):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            kept = json.loads(file.read_bytes()) if file.is_file() else {}
            if kept["processor"] == identity and kept["library"] == _stamp(library):
                yield kept


def keep(library: Path, identity: str, found: Mapping[str, Any], what: str = "") -> None:
    """Write what was found out to the first folder that can be written. `what` names several kinds of it."""
    kept = {"processor": identity, "library": _stamp(library), **found}
    for file in _files(library, identity, what):
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as partial:
                partial.write_text(json.dumps(kept, indent=1))
            return


def _files(library: Path, identity: str, what: str) -> list[Path]:
    """Return the files for a processor: beside the library, and in the user's cache."""
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    name = f"{library.stem}-{digest}{what}.json"
    folders = [library.parent]
    with suppress(RuntimeError):
        folders.append(cache_folder())
    return [folder / name for folder in folders]


def _stamp(library: Path) -> list[int]:
    """Return what changes when a library of the same sources is compiled again."""
    stat = library.stat()
    return [stat.st_size, stat.st_mtime_ns]
