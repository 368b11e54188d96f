"""Programs of earlier starts, found without tracing them.

JAX finds an executable in its persistent cache by the program that it has traced and lowered, which takes Python
longer than loading it. `SavedPrograms` is an index beside that cache: for each program the cache's key, and what the
results are like. It is a JSON file for everything that tracing depends on: the package's code, the versions of the
libraries, the machine, JAX's settings and the model's configuration. A program that it lacks, or that cannot be loaded,
is traced.

What is read of JAX's own modules is internal to it (the same from 0.10 to 0.12); where it has changed, nothing is found
and nothing is saved.
"""

import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxserve.compilation.cache import COMPILED
from jaxserve.core.config import ModelConfig
from jaxserve.core.machine import processor_features
from jaxserve.kernels import AttentionMeta, native

T = TypeVar("T")

log = logging.getLogger(__name__)

FOLDER = "jaxserve-programs"  # in that of JAX's cache
KEPT = 64  # indices: of so many models, options and versions of the code
LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "PJRT_NPROC")
STRUCTURES: dict[str, type] = {AttentionMeta.__name__: AttentionMeta}  # named tuples that programs may return

_asked = threading.local()  # for which key this thread has asked JAX's cache last


@dataclass(frozen=True)
class Entry:
    """A program in JAX's cache. `kept`: the arguments, as flat leaves, that the executable takes."""

    key: str
    kept: tuple[int, ...]
    results: Any  # as `_encoded`


def savable(kind: type[T]) -> type[T]:
    """Let programs that return this named tuple be saved. A class decorator."""
    STRUCTURES[kind.__name__] = kind
    return kind


class SavedPrograms:
    """The programs of one model, with everything that tracing depends on, in an index file; of none without a file."""

    def __init__(self, file: Path | None = None):
        self._file = file
        self._entries = {} if file is None else _read(file)
        self._changed = False
        if file is not None:
            _note_keys()

    def outlines(self, signature: str, arguments: tuple) -> Any:
        """The results of the program of this signature, without values; None if it is not known."""
        entry = self._entries.get(signature)
        return None if entry is None else _tried(_decoded, entry.results, _mesh(arguments))

    def load(self, signature: str, arguments: tuple) -> jax.stages.Compiled | None:
        """The executable for arguments like these, without values; None if it is not known or cannot be loaded."""
        started, entry = time.monotonic(), self._entries.get(signature)
        compiled = None if entry is None else _tried(_load, entry, arguments)
        if compiled is not None:
            jax.monitoring.record_event_duration_secs(COMPILED, time.monotonic() - started)
        return compiled

    def compile(self, signature: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compiles a program and notes where it is in JAX's cache. Mutates."""
        _asked.key = None
        compiled = lowered.compile()
        entry = None if _asked.key is None else _tried(_entry, _asked.key, compiled)
        if entry is not None:
            self._entries[signature] = entry
            self._changed = True
        return compiled

    def write(self) -> None:
        """Writes the index if it has changed; the least recently written ones go. A failure is only a warning."""
        if self._file is None or not self._changed:
            return
        self._changed = False
        entries = {name: [entry.key, entry.kept, entry.results] for name, entry in list(self._entries.items())}
        partial = self._file.with_suffix(f".{os.getpid()}.partial")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(entries), encoding="utf-8")
            partial.replace(self._file)
            by_age = sorted(self._file.parent.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
            for old in by_age[KEPT:]:
                old.unlink(missing_ok=True)
        except OSError as error:
            log.warning("the next start will trace its programs again: %s", error)


def saved_programs(config: ModelConfig, devices: Sequence[jax.Device]) -> SavedPrograms:
    """The programs of the padded `config` in JAX's persistent cache; none where that is not used.

    On CPU alone: elsewhere kernels' calls are registered while they are traced.
    """
    folder = jax.config.jax_compilation_cache_dir
    if not folder or "://" in folder or devices[0].platform != "cpu" or not jax.config.jax_enable_compilation_cache:
        return SavedPrograms()
    try:
        return SavedPrograms(Path(folder) / FOLDER / f"{_fingerprint(config, devices)}.json")
    except Exception:
        log.debug("programs are not saved", exc_info=True)
        return SavedPrograms()


def signature(name: str, static: tuple, arguments: tuple) -> str:
    """Tells a program from all others with the same fingerprint. `arguments` have no values."""
    leaves, structure = jax.tree.flatten(arguments)
    parts = [name, repr(static), str(structure)]
    parts += [f"{leaf.dtype}{leaf.shape}{_place(leaf.sharding)}" for leaf in leaves]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _place(sharding: Sharding | None) -> str:
    """A sharding with its devices by number."""
    if sharding is None:
        return ""
    named = isinstance(sharding, NamedSharding)
    devices = sharding.mesh.devices.flat if named else sharding.device_set
    return f"{sharding.spec if named else sharding}{[device.id for device in devices]}{sharding.memory_kind}"


def _fingerprint(config: ModelConfig, devices: Sequence[jax.Device]) -> str:
    """Of everything that tracing depends on beside a program's signature."""
    settings = {name: repr(value) for name, value in jax.config.values.items() if "cache" not in name}
    facts = {
        "code": _code(),
        "libraries": [version(name) for name in LIBRARIES],
        "python": sys.version,
        "runtime": devices[0].client.platform_version,
        "devices": len(jax.devices()),
        "processor": processor_features(),
        "kernels": [sorted(native.targets()), native.variants()],
        "environment": [os.environ.get(name) for name in ENVIRONMENT],
        "settings": sorted(settings.items()),
        "config": repr(config),
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _code() -> str:
    """A digest of the package's modules."""
    root, digest = Path(__file__).parent.parent, hashlib.sha256()
    for folder in ("core", "compilation", "executor", "kernels", "models", "parallel", "quantization", "sampling"):
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _read(file: Path) -> dict[str, Entry]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {name: Entry(key, tuple(kept), results) for name, (key, kept, results) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _note_keys() -> None:
    """Has every thread remember the key that it has asked JAX's cache for."""
    from jax._src import compilation_cache

    ask: Callable[..., Any] = compilation_cache.get_executable_and_time
    if getattr(ask, "notes_keys", False):
        return

    def asking(cache_key: str, *arguments: Any, **options: Any) -> Any:
        _asked.key = cache_key
        return ask(cache_key, *arguments, **options)

    asking.notes_keys = True  # type: ignore[attr-defined]
    compilation_cache.get_executable_and_time = asking


def _tried(function: Callable[..., T], *arguments: Any) -> T | None:
    """What the function returns; None where JAX's internals are not what they were, or a file is damaged."""
    try:
        return function(*arguments)
    except Exception:
        log.debug("a program cannot be saved, or loaded", exc_info=True)
        return None


def _entry(key: str, compiled: Any) -> Entry | None:
    """What is to be known of a compiled program; None where more belongs to it than can be saved."""
    unloaded = compiled._executable._unloaded_executable
    beyond = (unloaded.unordered_effects, unloaded.ordered_effects, unloaded.host_callbacks, unloaded.keepalive)
    if any(beyond) or unloaded.mut is not None or compiled._params.const_args:
        return None
    if not all(isinstance(sharding, NamedSharding) for sharding in unloaded.input_shardings):
        return None
    outlines = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(unloaded.output_avals, unloaded.output_shardings, strict=True)
    ]
    results = _encoded(jax.tree.unflatten(compiled.out_tree, outlines))
    return Entry(key, tuple(sorted(unloaded.kept_var_idx)), results)


def _encoded(results: Any) -> Any:
    """Outlines of results for JSON: an object for each array, and a list for each tuple, its kind first."""
    if isinstance(results, jax.ShapeDtypeStruct):
        spec = [list(axis) if isinstance(axis, tuple) else axis for axis in results.sharding.spec]
        return {"shape": results.shape, "dtype": results.dtype.name, "spec": spec}
    kind = type(results).__name__
    if type(results) is not tuple and STRUCTURES.get(kind) is not type(results):
        raise TypeError(f"results in a {kind} cannot be saved")
    return [kind, *map(_encoded, results)]


def _decoded(results: Any, mesh: Mesh) -> Any:
    """The inverse of `_encoded`, for arrays on these devices."""
    if isinstance(results, dict):
        spec = PartitionSpec(*(tuple(axis) if isinstance(axis, list) else axis for axis in results["spec"]))
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(tuple(results["shape"]), jnp.dtype(results["dtype"]), sharding=sharding)
    kind, *parts = results
    decoded = tuple(_decoded(part, mesh) for part in parts)
    return decoded if kind == "tuple" else STRUCTURES[kind](*decoded)


def _mesh(arguments: tuple) -> Mesh:
    """Of the devices that a program for these arguments runs on."""
    return next(leaf.sharding.mesh for leaf in jax.tree.leaves(arguments) if leaf.sharding is not None)


def _load(entry: Entry, arguments: tuple) -> jax.stages.Compiled | None:
    """What JAX makes of an executable that it has compiled. None if its cache has lost it."""
    from jax._src import compilation_cache
    from jax._src.core import ShapedArray
    from jax._src.interpreters.pxla import UnloadedMeshExecutable
    from jax._src.layout import Layout
    from jax._src.lib import xla_client

    mesh = _mesh(arguments)
    devices = xla_client.DeviceList(tuple(mesh.devices.flat))
    client = mesh.devices.flat[0].client
    executable, _ = compilation_cache.get_executable_and_time(entry.key, None, client, devices)
    if executable is None:
        return None
    leaves = jax.tree.leaves(arguments)
    kept = [leaves[index] for index in entry.kept]
    results, structure = jax.tree.flatten(_decoded(entry.results, mesh))
    unloaded = UnloadedMeshExecutable(
        xla_executable=executable,
        device_list=devices,
        backend=client,
        input_avals=[ShapedArray(leaf.shape, leaf.dtype) for leaf in kept],
        input_shardings=[leaf.sharding or NamedSharding(mesh, PartitionSpec()) for leaf in kept],
        output_avals=[ShapedArray(leaf.shape, leaf.dtype) for leaf in results],
        output_shardings=[leaf.sharding for leaf in results],
        committed=True,
        name="saved",
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx=set(entry.kept),
        mut=None,
        xla_in_layouts=[Layout.from_pjrt_layout(layout) for layout in executable.get_parameter_layouts()],
        dispatch_in_layouts=[None] * len(kept),
        xla_out_layouts=[Layout.from_pjrt_layout(layout) for layout in executable.get_output_layouts()],
        all_args_info=None,
        pgle_profiler=None,
    )
    return jax.stages.Compiled(unloaded.load(), [], (arguments, {}), structure, no_kwargs=True)
