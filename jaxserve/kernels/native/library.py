"""Where the native library lies, and its loading."""

import ctypes
import functools
import hashlib
import logging
import platform
from pathlib import Path

import jax
import jaxlib

ATTENTION, MATMUL = "jaxserve_paged_attention", "jaxserve_matmul"
VARIANTS = ("amx", "avx512", "avx2", "portable")  # of the product, fastest first
HERE = Path(__file__).resolve().parent


def library_path() -> Path:
    """Where the library for the installed jaxlib and the present sources belongs, whether or not it is there.

    Its name carries jaxlib's version and a hash of the sources, so that a stale library is never loaded.
    """
    sources = sorted(path for path in HERE.iterdir() if path.suffix in {".cc", ".h"})
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in [*sources, HERE / "build.py"])).hexdigest()[:12]
    return HERE / f"cpu-jaxlib{jaxlib.__version__}-{platform.machine()}-{digest}.so"


@functools.cache
def targets() -> frozenset[str]:
    """Loads the library and registers its custom calls, once; names them.

    Empty, with one line in the log, if the library is not built.
    """
    path = library_path()
    if not path.exists():
        logging.getLogger(__name__).warning(
            "native CPU kernels are not built, plain XLA will be slower: run python -m jaxserve.kernels.native.build"
        )
        return frozenset()
    library = ctypes.CDLL(str(path))
    for name in (ATTENTION, MATMUL):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return frozenset({ATTENTION, MATMUL})


def variants() -> tuple[str, ...]:
    """Variants of the product that this machine can run, fastest first; empty if the library is not built."""
    return _variants(library_path()) if targets() else ()


@functools.cache
def _variants(path: Path) -> tuple[str, ...]:
    has = ctypes.CDLL(str(path)).jaxserve_has_matmul
    has.argtypes, has.restype = [ctypes.c_char_p, ctypes.c_size_t], ctypes.c_bool
    return tuple(name for name in VARIANTS if has(name.encode(), len(name)))
