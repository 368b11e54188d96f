"""Loading of the native library, which is compiled on first use if that was not done at installation."""

import ctypes
import functools
import logging
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from jaxserve.core.machine import processors
from jaxserve.kernels.native.build import FAILURES, HERE, build, built, cache_folder, compiler
from jaxserve.kernels.native.checks import Check, checked
from jaxserve.kernels.native.choices import Timing, chosen
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
# The kernels, by their names in the checks, without which a call cannot serve.
KERNELS_OF = {
    ATTENTION: ("attention",),
    WRITE_AND_ATTEND: ("attention", "rows"),
    KV_WRITE: ("rows",),
    MATMUL: ("product", "rows"),
    **dict.fromkeys((DRAW, DRAW_ADJUSTED), ("draw",)),
    LOGPROBS: ("logprobs",),
    **dict.fromkeys((RESERVE_POOL, RELEASE_PAGES, TAKE_PAGES, PUT_PAGES), ("pool",)),
}
log = logging.getLogger(__name__)

WHAT_HELPS = "give a folder with XDG_CACHE_HOME, or install a wheel that has the kernels"

# Variants of the product, fastest first.
VARIANTS = ("amxint8", "amx", "vnni", "avx512bf16", "avx512", "avx2few", "avx2", "portable")


@functools.cache
def targets() -> frozenset[str]:
    """Return the names of the library's custom calls that may serve, after loading and registering all of them once.

    If JAX runs on CPU, a missing library is first compiled into the user's cache folder. Kernels that fail their check
    on this processor are left out (`checks.py`), and calls of which no variant remains. Products are computed by the
    variants that were fastest when they were timed here (`choices.py`). The result is empty, with a
    line in the log, if there is no library.
    """
    path = _library()
    if path is None:
        return frozenset()
    try:
        checks = checked(path)
    except OSError as error:
        log.warning("native CPU kernels cannot be checked, using the slower plain XLA: %s", error)
        return frozenset()
    library = ctypes.CDLL(str(path))
    library.jaxserve_set_processors(ctypes.c_int64(processors()))
    for name in CALLS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    calls = serving(library, checks)
    prefer(library, chosen(path, checks) if MATMUL in calls else ())
    return calls


@functools.cache
def host_function(name: str, kernel: str) -> Callable[..., Any] | None:
    """Return a function of the library that is no custom call, or None without the library or its kernel."""
    path = _library() if targets() else None
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    library.jaxserve_serves.restype = ctypes.c_bool
    return getattr(library, name) if library.jaxserve_serves(ctypes.c_char_p(kernel.encode())) else None


def serving(library: ctypes.CDLL, checks: tuple[Check, ...]) -> frozenset[str]:
    """Return the custom calls that may serve, after leaving out the kernels that are not right."""
    for check in checks:
        if not check.right:
            library.jaxserve_leave_out(ctypes.c_char_p(check.name.encode()))
    serves = library.jaxserve_serves
    serves.argtypes, serves.restype = [ctypes.c_char_p], ctypes.c_bool
    left = {call for call, kernels in KERNELS_OF.items() if all(serves(kernel.encode()) for kernel in kernels)}
    if left != set(CALLS):
        log.warning("plain XLA takes the place of native CPU kernels of which no variant is right on this processor")
    return frozenset(left)


def prefer(library: ctypes.CDLL, timings: Iterable[Timing]) -> None:
    """Let the variants serve that were clearly faster than the usual ones when they were timed on this processor."""
    for timing in timings:
        if timing.chosen != timing.usual:
            name, rows = ctypes.c_char_p(timing.chosen.encode()), ctypes.c_int64(timing.rows)
            library.jaxserve_prefer(name, ctypes.c_int64(timing.bits), ctypes.c_bool(timing.wide), rows)


@functools.cache
def _library() -> Path | None:
    if found := built(HERE):
        return found
    try:
        cache = cache_folder()
    except RuntimeError as error:
        log.warning("no folder for native CPU kernels, using the slower plain XLA: %s (%s)", error, WHAT_HELPS)
        return None
    if found := built(cache):
        return found
    if devices()[0].platform != "cpu":
        return None
    if shutil.which(compiler()[0]) is None:
        log.warning(
            "no C++ compiler (%s) for the native CPU kernels, using the slower plain XLA (CXX names one)",
            compiler()[0],
        )
        return None
    log.warning("compiling native CPU kernels into %s, once: it takes one to two minutes on two processors", cache)
    try:
        return build(cache)
    except FAILURES as error:
        log.warning("native CPU kernels not built, using the slower plain XLA: %s (%s)", error, _what_helps(error))
        return None


def _what_helps(error: Exception) -> str:
    """Return what to change so that the library can be compiled, by what kept it from that."""
    return WHAT_HELPS if isinstance(error, OSError) and error.filename else "CXX names another compiler"


def variants(bits: int = 16) -> tuple[str, ...]:
    """Return the variants of the product with weights of `bits` that may serve here, fastest first.

    The result is empty without the library.
    """
    return _variants(_library(), bits) if MATMUL in targets() else ()


def multiplies_all() -> bool:
    """Return whether the variants that may serve here are faster than XLA for many rows of bfloat16 as well."""
    return not {"amx", "avx512bf16"}.isdisjoint(variants()) or ("avx2" in variants() and "avx512" not in variants())


@functools.cache
def _variants(path: Path, bits: int) -> tuple[str, ...]:
    has = ctypes.CDLL(str(path)).jaxserve_has_matmul
    has.argtypes, has.restype = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int64], ctypes.c_bool
    return tuple(name for name in VARIANTS if has(name.encode(), len(name), bits))
