"""Loading of the native library, which is compiled on first use if that was not done at installation."""

import ctypes
import functools
import logging
import shutil
import subprocess
from pathlib import Path

import jax

from jaxserve.core.machine import processors
from jaxserve.kernels.native.build import HERE, build, built, cache_folder, compiler
from jaxserve.parallel.devices import devices

ATTENTION, WRITE_AND_ATTEND = "jaxserve_paged_attention", "jaxserve_write_and_attend"
KV_WRITE, MATMUL = "jaxserve_kv_write", "jaxserve_matmul"
DRAW, DRAW_ADJUSTED, LOGPROBS = "jaxserve_draw", "jaxserve_draw_adjusted", "jaxserve_logprobs"
RESERVE_POOL, RELEASE_PAGES = "jaxserve_reserve_pool", "jaxserve_release_pages"
TAKE_PAGES, PUT_PAGES = "jaxserve_take_pages", "jaxserve_put_pages"
CALLS = (
    *(ATTENTION, WRITE_AND_ATTEND, KV_WRITE, MATMUL),
    *(DRAW, DRAW_ADJUSTED, LOGPROBS),
    *(RESERVE_POOL, RELEASE_PAGES, TAKE_PAGES, PUT_PAGES),
)
log = logging.getLogger(__name__)

# Variants of the product, fastest first.
VARIANTS = ("amx", "vnni", "avx512bf16", "avx512", "avx2few", "avx2", "portable")


@functools.cache
def targets() -> frozenset[str]:
    """Return the names of the library's custom calls, after loading and registering them once.

    If JAX runs on CPU, a missing library is first compiled into the user's cache folder. The result is empty, with a
    line in the log, if there is no library.
    """
    path = _library()
    if path is None:
        return frozenset()
    library = ctypes.CDLL(str(path))
    library.jaxserve_set_processors(ctypes.c_int64(processors()))
    for name in CALLS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return frozenset(CALLS)


@functools.cache
def _library() -> Path | None:
    if found := built(HERE):
        return found
    try:
        cache = cache_folder()
    except RuntimeError as error:
        log.warning("no folder for native CPU kernels, using the slower plain XLA: %s", error)
        return None
    if found := built(cache):
        return found
    if devices()[0].platform != "cpu":
        return None
    if shutil.which(compiler()[0]) is None:
        log.warning("no C++ compiler (%s) for the native CPU kernels, using the slower plain XLA", compiler()[0])
        return None
    log.warning("compiling native CPU kernels into %s, which takes about 20 seconds and happens once", cache)
    try:
        return build(cache)
    except (OSError, subprocess.CalledProcessError) as error:
        log.warning("native CPU kernels not built, using the slower plain XLA: %s", error)
        return None


def variants() -> tuple[str, ...]:
    """Return the variants of the product that this machine can run, fastest first; empty without the library."""
    return _variants(_library()) if targets() else ()


def multiplies_all() -> bool:
    """Return whether the variants of this machine are faster than XLA for many rows of bfloat16 as well."""
    return not {"amx", "avx512bf16"}.isdisjoint(variants()) or variants()[:1] == ("avx2few",)


@functools.cache
def _variants(path: Path) -> tuple[str, ...]:
    has = ctypes.CDLL(str(path)).jaxserve_has_matmul
    has.argtypes, has.restype = [ctypes.c_char_p, ctypes.c_size_t], ctypes.c_bool
    return tuple(name for name in VARIANTS if has(name.encode(), len(name)))
