"""Where the native library lies, and its loading."""

import ctypes
import functools
import hashlib
import logging
import platform
from pathlib import Path

import jax
import jaxlib

HERE = Path(__file__).resolve().parent
TARGETS = ("jaxserve_paged_attention",)


def library_path() -> Path:
    """Where the library for the installed jaxlib and the present sources belongs, whether or not it is there.

    Its name carries jaxlib's version and a hash of the sources, so that a stale library is never loaded.
    """
    sources = sorted(path for path in HERE.iterdir() if path.suffix in {".cc", ".h"})
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in [*sources, HERE / "build.py"])).hexdigest()[:12]
    return HERE / f"cpu-jaxlib{jaxlib.__version__}-{platform.machine()}-{digest}.so"


@functools.cache
def available() -> bool:
    """Loads the library and registers its custom calls, once; False (and one line in the log) if it is not built."""
    path = library_path()
    if not path.exists():
        logging.getLogger(__name__).warning(
            "native CPU kernels are not built, attention will be slower: run python -m jaxserve.kernels.native.build"
        )
        return False
    library = ctypes.CDLL(str(path))
    for target in TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    return True
