"""Executables of other devices and of earlier starts, loaded without tracing their programs.

On CPU an executable that was compiled for some devices runs on any others, if it is serialised and loaded for those.
Programs of equal kind on as many devices are therefore compiled once: their signatures do not contain the devices.

JAX looks up an executable in its persistent cache by the traced and lowered program, and tracing takes longer than
loading. `SavedPrograms` is an index next to that cache: for each program the cache's key and the abstract results.
An index is a JSON file. It is valid for all that tracing depends on: the package's code, the versions of the libraries,
the machine, JAX's settings and the model's configuration. Programs that it lacks, or that cannot be loaded, are traced.

This module uses internals of JAX that are equal from 0.10 to 0.12. If they change, nothing is loaded and nothing saved.
"""

import hashlib
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxserve.compilation.cache import COMPILED, caches_executables, persistent_folder, write_json
from jaxserve.core.config import ModelConfig
from jaxserve.core.machine import processor_features
from jaxserve.kernels import AttentionMeta, native

T = TypeVar("T")

log = logging.getLogger(__name__)

FOLDER = "jaxserve-programs"  # in the folder of JAX's cache
MAX_INDICES = 64  # one for each combination of model, options and version of the code
LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "PJRT_NPROC")
STRUCTURES: dict[str, type] = {AttentionMeta.__name__: AttentionMeta}  # named tuples that programs may return

# What this thread looked up last in JAX's cache: its `key`, and whether it was `found`.
_last_look_up = threading.local()


@dataclass(frozen=True)
class Entry:
    """A program that was compiled in this process, or is in JAX's cache."""

    key: str | None  # in JAX's cache; None without a persistent one
    kept: tuple[int, ...]  # indices of the flat arguments that the executable takes
    results: Any  # encoded by `_encode`


def savable(kind: type[T]) -> type[T]:
    """Register a named tuple that saved programs may return. Use it as a class decorator."""
    STRUCTURES[kind.__name__] = kind
    return kind


class SavedPrograms:
    """The programs of one model that can be loaded: those of this process, and an index of earlier ones in a file.

    Without a file there are no earlier ones, and nothing is saved. Loading and compiling are thread-safe.
    """

    def __init__(self, file: Path | None = None):
        self._file = file
        self._entries = {} if file is None else _read(file)
        # What this process has compiled, for executables of other devices. One that was loaded cannot be serialised
        # again: it would lack functions.
        self._compiled: weakref.WeakValueDictionary[str, jax.stages.Compiled] = weakref.WeakValueDictionary()
        self._results: dict[str, Any] = {}  # the abstract results of programs that this process uses
        self._changed = False
        self._records = _attempt(_record_look_ups) is not None

    def abstract_results(self, signature: str, mesh: Mesh | None) -> Any:
        """Return the results of a program as shapes, or None if it cannot be loaded for the devices of a mesh."""
        entry = self._entries.get(signature)
        if entry is None or mesh is None or not can_load(mesh):
            return None
        if signature not in self._results:
            results = _attempt(_decode, entry.results, mesh)
            self._results[signature] = jax.tree.map(
                lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), results
            )
        return self._results[signature]

    def load(self, signature: str, arguments: tuple, mesh: Mesh | None) -> jax.stages.Compiled | None:
        """Return the executable for these abstract arguments, or None if it cannot be loaded."""
        started, entry = time.monotonic(), self._entries.get(signature)
        if entry is None or not can_load(mesh):
            return None
        loaded = _attempt(_load, entry, self._compiled.get(signature), arguments, mesh)
        if loaded is not None:
            jax.monitoring.record_event_duration_secs(COMPILED, time.monotonic() - started)
        return loaded

    def compile(self, signature: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compile a program, so that it can be loaded for other devices and by later starts."""
        _last_look_up.key, _last_look_up.found = None, False
        compiled = lowered.compile()
        # Without a look-up, JAX may have returned an executable of an earlier engine, which may have been loaded.
        certain = self._records and (_last_look_up.key is not None or not caches_executables())
        entry = _attempt(_entry_of, _last_look_up.key, compiled) if certain else None
        if entry is not None:
            if not _last_look_up.found:
                self._compiled[signature] = compiled
            self._entries[signature] = entry
            self._changed = True
        return compiled

    def write(self) -> None:
        """Write the index if it has changed, and delete the oldest ones. A failure is only a warning."""
        if self._file is None or not self._changed:
            return
        self._changed = False
        entries = {
            name: [entry.key, entry.kept, entry.results]
            for name, entry in list(self._entries.items())
            if entry.key is not None
        }
        try:
            write_json(self._file, entries, MAX_INDICES)
        except OSError as error:
            log.warning("the next start will trace its programs again: %s", error)


def saved_programs(config: ModelConfig, devices: Sequence[jax.Device]) -> SavedPrograms:
    """Return the index of programs for a padded configuration, in the folder of JAX's persistent cache.

    It is empty without a persistent cache, and on other platforms than CPU, where tracing registers the kernels' calls.
    """
    folder = persistent_folder(FOLDER)
    if folder is None or devices[0].platform != "cpu":
        return SavedPrograms()
    try:
        return SavedPrograms(folder / f"{fingerprint(config, devices)}.json")
    except Exception:
        log.debug("programs are not saved", exc_info=True)
        return SavedPrograms()


def can_load(mesh: Mesh | None) -> bool:
    """Return whether executables for the devices of a mesh are loaded without tracing: on CPU.

    Elsewhere tracing registers the kernels' calls, and JAX's persistent cache serves all devices with one entry.
    """
    return mesh is not None and mesh.devices.flat[0].platform == "cpu"


def signature(name: str, static: tuple, arguments: tuple) -> str:
    """Return a digest that identifies a program on any devices. `arguments` are abstract."""
    leaves, structure = jax.tree.flatten(arguments)
    mesh = mesh_of(arguments)
    parts = [name, repr(static), str(structure)]
    parts += [f"{leaf.dtype}{leaf.shape}{_sharding_text(leaf.sharding, mesh)}" for leaf in leaves]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def mesh_of(arguments: tuple) -> Mesh | None:
    """Return the mesh of the devices that a program for these arguments runs on, None if no argument has one."""
    shardings = (leaf.sharding for leaf in jax.tree.leaves(arguments))
    return next((sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)), None)


def _sharding_text(sharding: Sharding | None, mesh: Mesh | None) -> str:
    """Return the text of a sharding, with its devices as positions in a mesh."""
    if sharding is None:
        return ""
    if not isinstance(sharding, NamedSharding) or mesh is None:
        return f"{sharding}{[device.id for device in sharding.device_set]}{sharding.memory_kind}"
    if sharding.mesh is mesh:
        places = list(range(mesh.size))
    else:
        all_devices = list(mesh.devices.flat)
        places = [all_devices.index(device) for device in sharding.mesh.devices.flat]
    return f"{sharding.spec}{places}{sharding.memory_kind}"


def fingerprint(config: ModelConfig, devices: Sequence[jax.Device]) -> str:
    """Return a digest of all that tracing depends on besides a program's signature."""
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


def _record_look_ups() -> bool:
    """Patch JAX's cache so that every thread records what it looks up. Return True."""
    from jax._src import compilation_cache

    look_up: Callable[..., Any] = compilation_cache.get_executable_and_time
    if getattr(look_up, "records", False):
        return True

    def look_up_and_record(cache_key: str, *arguments: Any, **options: Any) -> Any:
        found = look_up(cache_key, *arguments, **options)
        _last_look_up.key, _last_look_up.found = cache_key, found[0] is not None
        return found

    look_up_and_record.records = True  # type: ignore[attr-defined]
    compilation_cache.get_executable_and_time = look_up_and_record
    return True


def _attempt(function: Callable[..., T], *arguments: Any) -> T | None:
    """Return the function's result, or None if JAX's internals have changed or a file is damaged."""
    try:
        return function(*arguments)
    except Exception:
        log.debug("a program cannot be saved or loaded", exc_info=True)
        return None


def _entry_of(key: str | None, compiled: Any) -> Entry | None:
    """Return the entry of a compiled program, or None if it has parts that cannot be saved."""
    unloaded = compiled._executable._unloaded_executable
    unsavable = (unloaded.unordered_effects, unloaded.ordered_effects, unloaded.host_callbacks, unloaded.keepalive)
    if any(unsavable) or unloaded.mut is not None or compiled._params.const_args:
        return None
    if not all(isinstance(sharding, NamedSharding) for sharding in unloaded.input_shardings):
        return None
    abstract = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(unloaded.output_avals, unloaded.output_shardings, strict=True)
    ]
    results = _encode(jax.tree.unflatten(compiled.out_tree, abstract))
    return Entry(key, tuple(sorted(unloaded.kept_var_idx)), results)


def _encode(results: Any) -> Any:
    """Encode abstract results for JSON: arrays as objects, and tuples as lists that begin with the type's name."""
    if isinstance(results, jax.ShapeDtypeStruct):
        spec = [list(axis) if isinstance(axis, tuple) else axis for axis in results.sharding.spec]
        return {"shape": results.shape, "dtype": results.dtype.name, "spec": spec}
    kind = type(results).__name__
    if type(results) is not tuple and STRUCTURES.get(kind) is not type(results):
        raise TypeError(f"results in a {kind} cannot be saved")
    return [kind, *map(_encode, results)]


def _decode(results: Any, mesh: Mesh) -> Any:
    """Decode abstract results (the inverse of `_encode`), for arrays on the devices of a mesh."""
    if isinstance(results, dict):
        spec = PartitionSpec(*(tuple(axis) if isinstance(axis, list) else axis for axis in results["spec"]))
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(tuple(results["shape"]), jnp.dtype(results["dtype"]), sharding=sharding)
    kind, *parts = results
    decoded = tuple(_decode(part, mesh) for part in parts)
    return decoded if kind == "tuple" else STRUCTURES[kind](*decoded)


@lru_cache(maxsize=64)
def _options(mesh: Mesh) -> Any:
    """Return the options that assign a program to the devices of a mesh."""
    from jax._src.compiler import get_compile_options

    assignment = mesh.devices.reshape(1, -1)
    return get_compile_options(
        num_replicas=1, num_partitions=mesh.size, device_assignment=assignment, backend=mesh.devices.flat[0].client
    )


def _load(
    entry: Entry, compiled: jax.stages.Compiled | None, arguments: tuple, mesh: Mesh
) -> jax.stages.Compiled | None:
    """Return the executable of an entry, built as JAX builds a compiled one, for the devices of a mesh.

    It is copied from `compiled`, an executable of the same program for any devices, or else it comes from JAX's cache.
    None if that lacks it.
    """
    from jax._src import compilation_cache
    from jax._src.core import ShapedArray
    from jax._src.interpreters.pxla import UnloadedMeshExecutable
    from jax._src.layout import Layout
    from jax._src.lib import xla_client

    devices = xla_client.DeviceList(tuple(mesh.devices.flat))
    client = mesh.devices.flat[0].client
    options = _options(mesh)
    if compiled is not None:
        serialized = compiled.runtime_executable().serialize()
        executable = client.deserialize_executable(serialized, devices, options)
    else:
        executable, _ = compilation_cache.get_executable_and_time(entry.key, options, client, devices)
    if executable is None:
        return None
    leaves = jax.tree.leaves(arguments)
    kept = [leaves[index] for index in entry.kept]
    results, structure = jax.tree.flatten(_decode(entry.results, mesh))
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
