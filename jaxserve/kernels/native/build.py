"""Compiles the native CPU kernels: at installation (setup.py), on first use, or by `python -m jaxserve.kernels.native`.

Needs a C++17 compiler ($CXX or c++), and of Python nothing that an installation lacks, such as jaxserve itself. jaxlib
gives its headers: it accepts a library built against its own or older ones, so installations take the oldest that is
supported.
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
OLDEST_JAXLIB = "0.10.2"  # that is supported; pyproject.toml says so too
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-DNDEBUG", "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi"]
# GCC warns about its own header (its bug 105593).
QUIET = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
AVX2 = ["-mavx2", "-mfma", *QUIET]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512", *QUIET]
BF16 = [*AVX512, "-mavx512bf16"]
VNNI = [*BF16, "-mavx512vnni"]
AMX = [*BF16, "-mamx-tile", "-mamx-bf16"]
# These choose at run time.
CALLS = (
    *("attention_call.cc", "kv_call.cc", "matmul_call.cc"),
    *("draw_call.cc", "logprobs_call.cc", "pool_call.cc"),
)
# Kernels, those for any machine first, and the instruction sets that each is compiled for.
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
    """The command that compiles: $CXX or c++."""
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def library_path(folder: Path, version: str | None = None) -> Path:
    """Where in a folder the library for a jaxlib (the installed one) and the present sources belongs, there or not.

    Its name carries that version and a hash of the sources, so that a stale library is never loaded.
    """
    sources = sorted(path for path in HERE.iterdir() if path.suffix in {".cc", ".h"})
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in [*sources, HERE / "build.py"])).hexdigest()[:12]
    return folder / f"cpu-jaxlib{version or metadata.version('jaxlib')}-{platform.machine()}-{digest}.so"


def cache_folder() -> Path:
    """Return the user's folder, for libraries that are compiled later than at installation.

    Raises RuntimeError for a user without a home, as in many containers.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve" / "native"


def built(folder: Path) -> Path | None:
    """A library in a folder that the installed jaxlib accepts."""
    paths = (library_path(folder), library_path(folder, OLDEST_JAXLIB))
    return next((path for path in paths if path.exists()), None)


def build(folder: Path = HERE) -> Path:
    """Compiles what is not there yet, into a folder, and returns the library's path.

    Raises OSError (no compiler, folder not writable) or subprocess.CalledProcessError (it does not compile; the
    compiler has said why on stderr).
    """
    if found := built(folder):
        return found
    library = library_path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{os.getpid()}-{library.name}"
    partial.touch()  # fails now, and not after all has been compiled, where nothing can be written
    try:
        with tempfile.TemporaryDirectory(prefix="jaxserve-build-") as scratch:
            shutil.copyfile(_compiled(Path(scratch)), partial)
        partial.replace(library)  # atomic: two builds at once do no harm
    finally:
        partial.unlink(missing_ok=True)
    return library


def _compiled(scratch: Path) -> Path:
    """Compile and link the library in an empty folder, and return its path there."""
    units = [*UNITS.get(platform.machine(), ELSEWHERE), *((call, ["-isystem", _headers()]) for call in CALLS)]
    objects = [f"{scratch}/{number}.o" for number in range(len(units))]

    def compile_unit(unit: tuple[str, list[str]], to: str) -> None:
        source, flags = unit
        subprocess.run([*compiler(), *FLAGS, *flags, "-c", HERE / source, "-o", to], check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_unit, units, objects))
    linked = scratch / "linked.so"
    subprocess.run([*compiler(), "-shared", *objects, "-pthread", "-o", linked], check=True)
    return linked


def build_or_say(folder: Path = HERE) -> Path | None:
    """The library's path, or None and one line on stderr that says why there is none."""
    try:
        return build(folder)
    except (OSError, subprocess.CalledProcessError, metadata.PackageNotFoundError) as error:
        sys.stderr.write(f"native CPU kernels not built, plain XLA is used instead: {error}\n")
        return None


def _headers() -> str:
    spec = util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        raise OSError("jaxlib, whose headers are needed, is not installed")
    return str(Path(spec.origin).parent / "include")
