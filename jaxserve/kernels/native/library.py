"""Where the native library lies, and its loading, on first use after compiling it."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from pathlib import Path

import jax
import jaxlib

ATTENTION, WRITE_AND_ATTEND = "jaxserve_paged_attention", "jaxserve_write_and_attend"
KV_WRITE, MATMUL = "jaxserve_kv_write", "jaxserve_matmul"
RESERVE_POOL, RELEASE_PAGES = "jaxserve_reserve_pool", "jaxserve_release_pages"
CALLS = (ATTENTION, WRITE_AND_ATTEND, KV_WRITE, MATMUL, RESERVE_POOL, RELEASE_PAGES)
VARIANTS = ("amx", "vnni", "avx512bf16", "avx512", "avx2few", "avx2", "portable")  # of the product, fastest first
HERE = Path(__file__).resolve().parent


def library_path(folder: Path = HERE) -> Path:
    """Where in a folder the library for the installed jaxlib and the present sources belongs, there or not.

    Its name carries jaxlib's version and a hash of the sources, so that a stale library is never loaded.
    """
    sources = sorted(path for path in HERE.iterdir() if path.suffix in {".cc", ".h"})
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in [*sources, HERE / "build.py"])).hexdigest()[:12]
    return folder / f"cpu-jaxlib{jaxlib.__version__}-{platform.machine()}-{digest}.so"


def cache_folder() -> Path:
    """The user's: where a library is compiled to on first use."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve" / "native"


@functools.cache
def targets() -> frozenset[str]:
    """Loads the library and registers its custom calls, once; names them.

    A library that is nowhere is compiled into the user's cache first, where JAX runs on CPU. Empty, with one line in
    the log, if that cannot be done.
    """
    path = _library()
    if path is None:
        return frozenset()
    library = ctypes.CDLL(str(path))
    for name in CALLS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return frozenset(CALLS)


@functools.cache
def _library() -> Path | None:
    """The library's path, once it is there."""
    paths = [library_path(), library_path(cache_folder())]
    for path in paths:
        if path.exists():
            return path
    if jax.default_backend() != "cpu":
        return None
    from jaxserve.kernels.native.build import build, compiler  # which needs this module

    log = logging.getLogger(__name__)
    if shutil.which(compiler()[0]) is None:
        log.warning("no C++ compiler (%s) for the native CPU kernels, plain XLA will be slower", compiler()[0])
        return None
    log.warning("compiling native CPU kernels into %s, once; it takes some 20 seconds", paths[1].parent)
    try:
        return build(paths[1].parent)
    except (OSError, subprocess.CalledProcessError) as error:
        log.warning("native CPU kernels not built, plain XLA will be slower: %s", error)
        return None


def variants() -> tuple[str, ...]:
    """Variants of the product that this machine can run, fastest first; empty without the library."""
    return _variants(_library()) if targets() else ()


def multiplies_all() -> bool:
    """Whether the variants here have a way for many rows of bfloat16 too, faster than XLA's products."""
    return not {"amx", "avx512bf16"}.isdisjoint(variants()) or variants()[:1] == ("avx2few",)


@functools.cache
def _variants(path: Path) -> tuple[str, ...]:
    has = ctypes.CDLL(str(path)).jaxserve_has_matmul
    has.argtypes, has.restype = [ctypes.c_char_p, ctypes.c_size_t], ctypes.c_bool
    return tuple(name for name in VARIANTS if has(name.encode(), len(name)))
