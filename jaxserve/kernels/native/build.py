"""Compilation of the native CPU kernels: at installation, on first use, or by `python -m jaxserve.kernels.native`.

It needs a C++17 compiler ($CXX or c++). setup.py loads this module alone, so it must not import jaxserve. jaxlib
provides the headers. It accepts a library that was built with its own or with older headers, so that installations
build with the oldest supported jaxlib.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata, util
from pathlib import Path

HERE = Path(__file__).resolve().parent
OLDEST_JAXLIB = "0.10.2"  # the oldest supported, as in pyproject.toml
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-DNDEBUG", "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi"]
# GCC warns about its own header (its bug 105593).
QUIET = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
AVX2 = ["-mavx2", "-mfma", *QUIET]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512", *QUIET]
BF16 = [*AVX512, "-mavx512bf16"]
VNNI = [*BF16, "-mavx512vnni"]
AMX = [*BF16, "-mamx-tile", "-mamx-bf16"]
# The custom calls, which choose a kernel at run time.
CALLS = (
    *("attention_call.cc", "kv_call.cc", "matmul_call.cc"),
    *("draw_call.cc", "logprobs_call.cc", "pool_call.cc"),
)
# The kernels and the instruction sets that each is compiled for; portable kernels come first.
PORTABLE = ("attention.cc", "matmul_vector.cc", "rows.cc", "draw.cc", "logprobs.cc")
X86_64 = (
    *((source, flags) for source in PORTABLE for flags in ([], AVX2, AVX512)),
    *(("attention_decode.cc", flags) for flags in (AVX2, BF16)),
    ("attention_vnni.cc", [*AVX512, "-mavx512vnni"]),
    ("attention_amx.cc", AMX),
    ("attention_bf16.cc", BF16),
    *(("matmul_panels.cc", flags) for flags in (AVX2, VNNI)),
    ("matmul_avx2.cc", AVX2),
    ("matmul_vnni.cc", VNNI),
    ("matmul_amx.cc", AMX),
)
UNITS = {"x86_64": X86_64, "AMD64": X86_64}
ELSEWHERE = tuple((source, []) for source in PORTABLE)


def compiler() -> list[str]:
    """Return the compiler's command: $CXX or c++."""
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def library_path(folder: Path, version: str | None = None) -> Path:
    """Return the path in a folder of the library for the present sources and a jaxlib, by default the installed one.

    The file need not exist. Its name contains the version and a hash of the sources, so that a stale library is never
    loaded.
    """
    sources = sorted(path for path in HERE.iterdir() if path.suffix in {".cc", ".h"})
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in [*sources, HERE / "build.py"])).hexdigest()[:12]
    return folder / f"cpu-jaxlib{version or metadata.version('jaxlib')}-{platform.machine()}-{digest}.so"


def cache_folder() -> Path:
    """Return the user's folder for libraries that are compiled after installation.

    Raise RuntimeError if the user has no home folder, as in many containers.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve" / "native"


def built(folder: Path) -> Path | None:
    """Return a library in a folder that the installed jaxlib accepts, or None."""
    paths = (library_path(folder), library_path(folder, OLDEST_JAXLIB))
    return next((path for path in paths if path.exists()), None)


def build(folder: Path = HERE) -> Path:
    """Return the path of the library in a folder, after compiling it if it is missing.

    Raise OSError if there is no compiler or the folder is not writable, and subprocess.CalledProcessError if the
    compilation fails; the compiler reports why on stderr.
    """
    if found := built(folder):
        return found
    library = library_path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{os.getpid()}-{library.name}"
    partial.touch()  # fails before the compilation if the folder is not writable
    try:
        with tempfile.TemporaryDirectory(prefix="jaxserve-build-") as scratch:
            shutil.copyfile(_compiled(Path(scratch)), partial)
        partial.replace(library)  # atomic, so that two builds may run at once
    finally:
        partial.unlink(missing_ok=True)
    return library


def _compiled(scratch: Path) -> Path:
    """Compile and link the library in an empty folder, and return its path there."""
    units = [*UNITS.get(platform.machine(), ELSEWHERE), *((call, ["-isystem", _headers()]) for call in CALLS)]
    objects = [f"{scratch}/{index}.o" for index in range(len(units))]

    def compile_unit(unit: tuple[str, list[str]], to: str) -> None:
        source, flags = unit
        subprocess.run([*compiler(), *FLAGS, *flags, "-c", HERE / source, "-o", to], check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_unit, units, objects))
    linked = scratch / "linked.so"
    subprocess.run([*compiler(), "-shared", *objects, "-pthread", "-o", linked], check=True)
    return linked


def build_or_report(folder: Path = HERE) -> Path | None:
    """Return the path of the library, or None after writing the reason to stderr."""
    try:
        return build(folder)
    except (OSError, subprocess.CalledProcessError, metadata.PackageNotFoundError) as error:
        sys.stderr.write(f"native CPU kernels not built, plain XLA is used instead: {error}\n")
        return None


def _headers() -> str:
    spec = util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        raise OSError("jaxlib is not installed, and its headers are needed")
    return str(Path(spec.origin).parent / "include")
