"""JAX's persistent compilation cache, and a counter of compilations.

JAX reports every compilation, or load from the persistent cache, to its monitoring listeners. `CompileCounter` is one.
"""

import json
import logging
import os
import threading
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import jax

from jaxserve.core.files import replace_file

log = logging.getLogger(__name__)

COMPILED = "/jax/core/compile/backend_compile_duration"  # the name of the monitoring event
WHAT_HELPS = "give a folder with --compile-cache or XDG_CACHE_HOME"
# What an executable is compiled for: steps that run block by block, fused steps, placements that no instance uses yet.
BLOCK_TIER, FUSED_TIER, AHEAD_TIER = "block", "fused", "ahead"


def default_cache_folder() -> Path:
    """Return jaxserve/xla in the user's cache folder (XDG_CACHE_HOME or ~/.cache).

    Raise RuntimeError if the user has no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxserve" / "xla"


def user_cache_folder() -> Path | None:
    """Return jaxserve in the user's cache folder; None if the user has no home folder."""
    try:
        return default_cache_folder().parent
    except RuntimeError:
        return None


def use_persistent_cache(folder: str | Path | None) -> None:
    """Store compiled executables in `folder`, or in the default folder for None.

    With None, the user's JAX_COMPILATION_CACHE_DIR has precedence. An unusable folder is only a warning.
    """
    if folder is None and os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    try:
        folder = Path(folder) if folder is not None else default_cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder, as in many containers
        log.warning("programs are compiled at every start, because none can be kept: %s (%s)", error, WHAT_HELPS)
        return
    if not os.access(folder, os.W_OK):
        log.warning("programs that are not in %s are compiled at every start: it is read-only (%s)", folder, WHAT_HELPS)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # In a folder that cannot be written JAX would try, and warn, for each program.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0 if os.access(folder, os.W_OK) else inf)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def caches_executables() -> bool:
    """Return whether JAX looks up executables in a persistent cache."""
    return bool(jax.config.jax_compilation_cache_dir and jax.config.jax_enable_compilation_cache)


def keeps_executables() -> bool:
    """Return whether JAX can store executables in a persistent cache, for the next start."""
    folder = jax.config.jax_compilation_cache_dir
    return caches_executables() and ("://" in folder or os.access(folder, os.W_OK))


def persistent_folder(name: str) -> Path | None:
    """Return a folder next to the compiled executables, None if there is no persistent cache in a local folder."""
    folder = jax.config.jax_compilation_cache_dir
    return Path(folder) / name if caches_executables() and "://" not in folder else None


def write_json(file: Path, value: Any, max_files: int) -> None:
    """Write a JSON file as a whole, and delete the oldest in its folder beyond `max_files`.

    Raise OSError if the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, json.dumps(value).encode())
    by_age = sorted(file.parent.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    for old in by_age[max_files:]:
        old.unlink(missing_ok=True)


class CompileCounter:
    """A counter of compilations by tier: the block tier, except in threads that belong to another one."""

    def __init__(self, on_compile: Callable[[str], None] | None = None):
        self.counts = {BLOCK_TIER: 0, FUSED_TIER: 0, AHEAD_TIER: 0}
        self._thread = threading.local()  # `tier`: that of a thread's compilations
        self._on_compile = on_compile
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **kwargs: object) -> None:
        if event != COMPILED:
            return
        tier = getattr(self._thread, "tier", BLOCK_TIER)
        self.counts[tier] += 1
        if self._on_compile is not None:
            self._on_compile(tier)

    def count_thread_as(self, tier: str) -> None:
        """Count what the calling thread compiles from now on for another tier."""
        self._thread.tier = tier

    def close(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)
