"""Preparation of a model while its server is idle: what is made, when it is not, and how it comes into use."""

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from jaxserve.build import BuiltEngine
from jaxserve.calibration.background import Wanted, missing
from jaxserve.calibration.sensitivity.profile import FILE_NAME as PROFILE
from jaxserve.checkpoint import Checkpoint
from jaxserve.checkpoint.imported import ImportedStore
from jaxserve.core.config import EngineConfig
from jaxserve.core.machine import host_memory, resident_bytes
from jaxserve.core.precision import BITS
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.background_process import BackgroundProcess

log = logging.getLogger(__name__)

# Bytes of weights above which one processor would work for too long, and above which less text has to do.
MAX_BYTES, MANY_BYTES = 5 << 30, 1 << 30
FEWER_PIECES = 20
PROCESS_BYTES = 900 << 20  # of Python, JAX and compiled programs
COPIES = 2.0  # bytes of memory that the work takes, as a multiple of those of the weights
DISK_MARGIN = 256 << 20  # bytes that stay free


def prepare_in_background(built: BuiltEngine, engine: AsyncEngine) -> BackgroundProcess | None:
    """Prepare and measure what is not known of a server's model, while the server is idle, and log it, or why not.

    Return the process, which ends with the engine, or None if there is nothing to do.
    """
    checkpoint, config = built.kept.checkpoint, built.resolved.config
    if (wanted := wanted_of(built)) is None or not missing(wanted, checkpoint):
        return None
    size = _weight_bytes(checkpoint)
    if reason := _obstacle(built, size, wanted):
        log.info("%s: layers are not prepared in the background", reason)
        return None
    what = f"layers in {', '.join(wanted.variants)} are" if wanted.variants else "what rounding costs is"
    log.info(
        "%s prepared and measured while the server is idle, and kept in %s, with at most %d MB (--no-prepare: not)",
        what,
        wanted.folder,
        _disk_bytes(size, wanted) >> 20,
    )
    process = BackgroundProcess(
        [sys.executable, "-m", "jaxserve.cli.background", json.dumps(_described(wanted))],
        busy=_busy(engine),
        max_bytes=_memory_bytes(size),
        done=built.renew,
        environment=_environment(config),
    )
    engine.call_before_close(process.close)
    return process


def wanted_of(built: BuiltEngine) -> Wanted | None:
    """Return what an engine wants to be made for its model; None if that is nothing, or not to be made.

    The owner of a model that has a profile has decided. A recording has one order of layers from its start to its end.
    """
    checkpoint, config, folder = built.kept.checkpoint, built.resolved.config, built.kept.folder
    if not config.prepare or folder is None or config.step_log is not None:
        return None
    if isinstance(checkpoint.store, ImportedStore) or (checkpoint.path / PROFILE).is_file():
        return None
    wanted = Wanted(
        str(checkpoint.path),
        str(folder),
        tuple(name for name in built.kept.wanted if name in BITS),
        built.rounded_layers,
        checkpoint.config.dtype,
        FEWER_PIECES if _weight_bytes(checkpoint) > MANY_BYTES else Wanted.pieces,
        None if config.tokenizer is None else str(config.tokenizer),
    )
    return wanted if wanted.variants or wanted.rounded else None


def _weight_bytes(checkpoint: Checkpoint) -> int:
    return sum(file.stat().st_size for file in checkpoint.path.glob("*.safetensors"))


def _described(wanted: Wanted) -> dict[str, object]:
    """Return the argument of the process."""
    return {"parent": os.getpid(), "wanted": asdict(wanted)}


def _environment(config: EngineConfig) -> dict[str, str]:
    """Return the environment of the process, which computes on CPU with one thread."""
    cache = {} if config.compile_cache is None else {"JAX_COMPILATION_CACHE_DIR": str(config.compile_cache)}
    return {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "PJRT_NPROC": "1", **cache}


def _obstacle(built: BuiltEngine, size: int, wanted: Wanted) -> str:
    """Return why nothing can be made, or "". `size`: bytes of the weights."""
    if size > MAX_BYTES:
        return (
            f"the model has {size / 1e9:.0f} GB (`jaxserve quantize` and `jaxserve profile` do it with all processors)"
        )
    free = host_memory()
    if built.resolved.devices[0].platform == "cpu":  # what the server may still take of its own budget
        free -= max(0, built.resolved.ledgers.fullest.budget - resident_bytes())
    if free < (needed := _memory_bytes(size)):
        return f"{max(0, free) >> 20} MB of memory are left beside the server, and {needed >> 20} are needed"
    folder = next(path for path in (Path(wanted.folder), *Path(wanted.folder).parents) if path.exists())
    if (left := shutil.disk_usage(folder).free) < (needed := _disk_bytes(size, wanted) + DISK_MARGIN):
        return f"{left >> 20} MB are free in {folder}, and {needed >> 20} are needed"
    return ""


def _memory_bytes(size: int) -> int:
    return PROCESS_BYTES + int(COPIES * size)


def _disk_bytes(size: int, wanted: Wanted) -> int:
    """Return the bytes of the layers that are kept, which have no more than 2 bits of scales for each weight."""
    return (1 << 20) + sum(size * (BITS[name] + 2) // 16 for name in wanted.prepared)


def _busy(engine: AsyncEngine) -> Callable[[], bool]:
    def busy() -> bool:
        states = engine.snapshots().values()
        working = any(state.num_running or state.num_waiting or state.num_held for state in states)
        return engine.draining or working or engine.waiting_room().count > 0

    return busy
