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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
AMX_INT8 = [*AMX, "-mamx-int8"]
# The custom calls, which choose a kernel at run time. They and the checks compute little: they are compiled quickly.
CALLS = (
    *("attention_call.cc", "kv_call.cc", "matmul_call.cc"),
    *("draw_call.cc", "logprobs_call.cc", "pool_call.cc", "rounding_call.cc"),
)
CHECKS = (
    *("check_call.cc", "check_attention.cc", "check_matmul.cc", "check_rounding.cc", "check_rows.cc"),
    "time_matmul.cc",
)
QUICKLY = ["-O1"]
# The kernels and the instruction sets that each is compiled for. Those that take longest come first, so that all
# processors finish at about the same time.
PORTABLE = ("attention.cc", "matmul_vector.cc", "rows.cc", "draw.cc", "logprobs.cc")
ROUNDING = ("rounding.cc", ["-ffp-contract=off"])  # so that it gives the same on all machines
X86_64 = (
    ("matmul_vnni.cc", VNNI),
    ("matmul_avx2.cc", AVX2),
    *(("matmul_panels.cc", flags) for flags in (VNNI, AVX2)),
    *(("attention_decode.cc", flags) for flags in (BF16, AVX2)),
    ("attention_vnni.cc", [*AVX512, "-mavx512vnni"]),
    ("attention_bf16.cc", BF16),
    ("attention_amx.cc", AMX),
    ("matmul_amx.cc", AMX),
    ("matmul_amx_int8.cc", AMX_INT8),
    *((source, flags) for source in PORTABLE for flags in (AVX512, AVX2, [])),
    *((ROUNDING[0], [*flags, *ROUNDING[1]]) for flags in (AVX512, AVX2, [])),
)
NOT_IN_OLD_COMPILERS = (AMX, AMX_INT8)  # kernels that need these are left out if the compiler does not know them
UNITS = {"x86_64": X86_64, "AMD64": X86_64}
ELSEWHERE = (*((source, []) for source in PORTABLE), ROUNDING)
COMPILER_TIME = 1200.0  # seconds that a unit may take; it takes up to half a minute of one processor
# What may keep the library from being compiled: no compiler, folder, memory, thread or header, or a compiler that fails
# or hangs.
FAILURES = (OSError, RuntimeError, subprocess.SubprocessError, metadata.PackageNotFoundError)


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
    return next((path for path in paths if os.path.isfile(path)), None)  # no error where the folder cannot be read


def build(folder: Path = HERE) -> Path:
    """Return the path of the library in a folder, after compiling it if it is missing.

    Raise one of `FAILURES` if this is impossible. If the compiler fails, its messages are on stderr.
    """
    if found := built(folder):
        return found
    library = library_path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(library) as partial, tempfile.TemporaryDirectory(prefix="jaxserve-build-") as scratch:
        shutil.copyfile(_compiled(Path(scratch)), partial)
    return library


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield an empty file that finally takes the place of `path`, for all users, unless there is an error.

    Its name is new, even if processes on other machines or in other containers replace the same path.
    """
    descriptor, name = tempfile.mkstemp(prefix=".", suffix=f"-{path.name}", dir=path.parent)
    os.close(descriptor)
    partial = Path(name)
    try:
        yield partial
        partial.chmod(0o644)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _compiled(scratch: Path) -> Path:
    """Compile and link the library in an empty folder, and return its path there."""
    calls = [(source, [*QUICKLY, "-isystem", _headers()]) for source in CALLS]
    unknown = [flags for flags in NOT_IN_OLD_COMPILERS if not _knows(flags, scratch)]
    units = [(source, flags) for source, flags in UNITS.get(platform.machine(), ELSEWHERE) if flags not in unknown]
    units += [*calls, *((source, QUICKLY) for source in CHECKS)]
    objects = [f"{scratch}/{index}.o" for index in range(len(units))]

    def compile_unit(unit: tuple[str, list[str]], to: str) -> None:
        source, flags = unit
        _compile([*FLAGS, *flags, "-c", str(HERE / source), "-o", to])

    with ThreadPoolExecutor(_processors()) as pool:
        list(pool.map(compile_unit, units, objects))
    linked = scratch / "linked.so"
    _compile(["-shared", *objects, "-pthread", "-o", str(linked)])
    return linked


def _knows(flags: list[str], scratch: Path) -> bool:
    """Return whether the compiler accepts these flags."""
    command = [*compiler(), *flags, "-x", "c++", "-c", os.devnull, "-o", str(scratch / "nothing.o")]
    return subprocess.run(command, capture_output=True, timeout=COMPILER_TIME, check=False).returncode == 0


def _compile(arguments: list[str]) -> None:
    """Run the compiler. Its messages are only written, to stderr, if it fails: a user can do nothing about warnings."""
    try:
        subprocess.run([*compiler(), *arguments], check=True, capture_output=True, timeout=COMPILER_TIME)
    except subprocess.CalledProcessError as error:
        sys.stderr.write((error.stdout + error.stderr).decode(errors="replace"))
        raise


def _processors() -> int:
    """Return how many processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build_or_report(folder: Path | None = HERE) -> Path | None:
    """Return the path of the library, or None after writing the reason to stderr. No folder means the user's cache."""
    try:
        return build(cache_folder() if folder is None else folder)
    except FAILURES as error:
        sys.stderr.write(f"native CPU kernels not built, plain XLA is used instead: {error}\n")
        return None


def _headers() -> str:
    spec = util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        raise OSError("jaxlib is not installed, and its headers are needed")
    return str(Path(spec.origin).parent / "include")
