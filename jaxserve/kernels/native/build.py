"""Compiles the native CPU kernels: `python -m jaxserve.kernels.native.build`. Needs a C++17 compiler ($CXX or c++).

The library is built against the headers of the jaxlib that is installed, because one built against newer headers is
rejected.
"""

import argparse
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

from jaxserve.kernels.native.library import HERE, library_path

FLAGS = ["-std=c++17", "-O3", "-fPIC", "-DNDEBUG", "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi"]
AVX2 = ["-mavx2", "-mfma"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"]
# GCC warns about its own header (its bug 105593).
QUIET = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
VNNI = [*AVX512, "-mavx512vnni", "-mavx512bf16", *QUIET]
AMX = [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", *QUIET]
CALLS = ("attention_call.cc", "kv_call.cc", "matmul_call.cc", "pool_call.cc")  # these choose at run time
# Kernels and the instruction sets that each is compiled for.
X86_64 = (
    *(("attention.cc", flags) for flags in ([], AVX2, AVX512)),
    *(("matmul_vector.cc", flags) for flags in ([], AVX2, AVX512)),
    *(("rows.cc", flags) for flags in ([], AVX2, AVX512)),
    *(("attention_decode.cc", [*flags, *QUIET]) for flags in (AVX2, [*AVX512, "-mavx512bf16"])),
    ("attention_vnni.cc", [*AVX512, "-mavx512vnni", *QUIET]),
    ("attention_amx.cc", AMX),
    *(("matmul_panels.cc", flags) for flags in ([*AVX2, *QUIET], VNNI)),
    ("matmul_avx2.cc", [*AVX2, *QUIET]),
    ("matmul_vnni.cc", VNNI),
    ("matmul_amx.cc", AMX),
)
UNITS = {"x86_64": X86_64, "AMD64": X86_64}
ELSEWHERE = (("attention.cc", []), ("matmul_vector.cc", []), ("rows.cc", []))


def compiler() -> list[str]:
    """The command that compiles: $CXX or c++."""
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def build(folder: Path = HERE) -> Path:
    """Compiles what is not there yet, into a folder, and returns the library's path.

    Raises OSError (no compiler, folder not writable) or subprocess.CalledProcessError (it does not compile; the
    compiler has said why on stderr).
    """
    library = library_path(folder)
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        objects = []
        for number, (source, flags) in enumerate(UNITS.get(platform.machine(), ELSEWHERE)):
            objects.append(f"{scratch}/{number}.o")
            subprocess.run([*compiler(), *FLAGS, *flags, "-c", HERE / source, "-o", objects[-1]], check=True)
        linked = Path(scratch) / "linked.so"
        headers = ["-isystem", jax.ffi.include_dir()]
        subprocess.run(
            [
                *compiler(),
                *FLAGS,
                *headers,
                "-shared",
                *(HERE / call for call in CALLS),
                *objects,
                "-pthread",
                "-o",
                linked,
            ],
            check=True,
        )
        linked.replace(library)  # atomic: two builds at once do no harm
    return library


def main() -> int:
    """Command line: builds, or says why not. With --optional a failure is only a message."""
    parser = argparse.ArgumentParser(description="Compile jaxserve's native CPU kernels.")
    parser.add_argument("--optional", action="store_true", help="succeed even if they cannot be built")
    optional = parser.parse_args().optional
    try:
        sys.stdout.write(f"{build()}\n")
    except (OSError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"native CPU kernels not built, plain XLA is used instead: {error}\n")
        return 0 if optional else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
