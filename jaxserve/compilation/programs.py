"""Programs, and their parallel compilation ahead of the first use, from the shapes of arguments alone."""

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from jaxserve.compilation.cache import keeps_executables
from jaxserve.compilation.saved import SavedPrograms, can_load, mesh_of, signature
from jaxserve.core.machine import processors, trim_heap
from jaxserve.core.progress import COMPILING, COMPILING_UNKEPT, LOADING, Progress, ignore_progress

MAX_THREADS = 16
# Executables between two trims of the heap: each compilation leaves more than 1 MB of freed memory in the process.
TRIM_EVERY = 16


class Program:
    """A jitted function on certain devices, with its executables, each for arguments of certain shapes.

    The name and the shapes of the arguments together identify what is computed, on any devices.
    """

    def __init__(self, name: str, function: Any, mesh: Mesh | None = None):
        """`mesh` has the devices of a program without arguments on devices; other arguments tell them."""
        self.name, self.function, self.mesh = name, function, mesh
        self.executables: dict[Hashable, Callable] = {}
        self.results: dict[Hashable, Any] = {}  # of each executable, as shapes

    def __call__(self, *arguments: Any) -> Any:
        """Call the jitted function, which JAX traces for new shapes, or trace it into another program."""
        return self.function(*arguments)

    def at(self, key: Hashable) -> Callable:
        """Return the executable that was compiled under a key, or the jitted function if there is none.

        A call of either costs the same: 9 us with 20 leaves on CPU.
        """
        return self.executables.get(key, self.function)

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """Return the program as `jax.jit` lowers it for these arguments.

        JAX would keep the trace and the module for later calls, about 0.7 MB for each executable.
        """
        lowered = self.function.lower(*arguments)
        self.function.clear_cache()
        return lowered


def untraced(function: Callable) -> Callable:
    """Return a function that computes the same, and that JAX has never traced.

    JAX keeps what it has compiled for a function. It does not look into its persistent cache then, so that the
    executable cannot be saved, nor loaded for other devices.
    """
    return partial(function)


class StartsCompiling(Protocol):
    """A listener that is told all programs of an instance: a `Compiler`, or a check that they are there."""

    def compile(self, program: Program, key: Hashable, *arguments: Any, static: tuple = ()) -> Any:
        """Take note of a program for these arguments under a key, and return the abstract results."""
        ...


@dataclass(frozen=True)
class _Task:
    """An executable to compile or load."""

    program: Program
    key: Hashable
    arguments: tuple
    static: tuple
    results: Any  # as shapes
    future: Future[bool]  # whether the executable is there


class Compiler:
    """A compiler with its own threads, which loads saved programs if it can. Only `executable` is thread-safe.

    Several compilers may work for the same programs.
    """

    def __init__(self, saved: SavedPrograms | None = None, progress: Progress = ignore_progress):
        self._saved = saved or SavedPrograms()
        self._progress = progress
        self._activity = LOADING  # until something has to be compiled
        self._ready = 0  # executables
        self._counting = Lock()  # of `_ready`
        self._tasks: dict[tuple[Program, Hashable], _Task] = {}
        self._named: dict[str, _Task] = {}  # the same by signature
        self._threads: ThreadPoolExecutor | None = None

    def compile(self, program: Program, key: Hashable, *arguments: Any, static: tuple = ()) -> Any:
        """Start to compile a program for these arguments under `key`, unless it is there or was started before.

        Return the abstract results, without shardings. Raise what lowering raises.
        """
        if key in program.executables:
            return program.results[key]
        task = self._tasks.get((program, key))
        if task is None:
            task = self._start(program, key, jax.tree.map(abstract, arguments), static)
            self._tasks[program, key] = task
            self._report()
        return task.results

    def wait(self) -> None:
        """Wait until all started executables are ready, and raise the first error among them."""
        for index, future in enumerate(as_completed(task.future for task in self._tasks.values()), start=1):
            future.result()
            self._report()
            if self._activity != LOADING and index % TRIM_EVERY == 0:
                trim_heap()
        for task in self._tasks.values():
            if not task.future.result():  # an executable that could not be loaded
                self._compile(task.program, task.key, task.arguments, task.static)
                self._report()
        self._tasks.clear()
        self._named.clear()
        self._ready = 0
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def executable(self, program: Program, *arguments: Any) -> Callable:
        """Load or compile a program for these arguments in the caller's thread."""
        name = signature(program.name, (), arguments)
        loaded = self._saved.load(name, arguments, mesh_of(arguments))
        return loaded or self._saved.compile(name, program.lower(*arguments))

    def save(self) -> None:
        """Save an index of the executables in JAX's cache for the next start. Nothing may be compiling."""
        if keeps_executables():
            self._saved.write()

    def submit(self, function: Callable[..., bool], *arguments: Any) -> Future[bool]:
        """Start a function in a thread of this compiler."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(compile_threads(), "jaxserve-compile")
        return self._threads.submit(function, *arguments)

    def _start(self, program: Program, key: Hashable, arguments: tuple, static: tuple) -> _Task:
        name, mesh = signature(program.name, static, arguments), program.mesh or mesh_of(arguments)
        same = self._named.get(name) if can_load(mesh) else None
        results = same.results if same is not None else self._saved.abstract_results(name, mesh)
        if results is not None:
            program.results[key] = results
            future = self.submit(self._load, program, key, name, arguments, mesh, same)
        else:
            self._activity = COMPILING if keeps_executables() else COMPILING_UNKEPT
            # Lowered here, not in the threads: lowering is Python, so threads would not be faster but would have a
            # random order. Mosaic numbers GPU kernels in the order of lowering, so that a later start would not find
            # them in the persistent cache.
            lowered = program.lower(*arguments, *static)
            program.results[key] = results = jax.tree.map(_shape, lowered.out_info)
            future = self.submit(self._compile_lowered, program, key, name, lowered)
        task = _Task(program, key, arguments, static, results, future)
        self._named.setdefault(name, task)
        return task

    def _load(
        self, program: Program, key: Hashable, name: str, arguments: tuple, mesh: Mesh, same: _Task | None
    ) -> bool:
        if same is not None:
            same.future.exception()  # wait for the executable that this one is copied from
        loaded = self._saved.load(name, arguments, mesh)
        if loaded is not None:
            self._put(program, key, loaded)
        return loaded is not None

    def _compile(self, program: Program, key: Hashable, arguments: tuple, static: tuple) -> None:
        lowered = program.lower(*arguments, *static)
        self._compile_lowered(program, key, signature(program.name, static, arguments), lowered)

    def _compile_lowered(self, program: Program, key: Hashable, name: str, lowered: jax.stages.Lowered) -> bool:
        self._put(program, key, self._saved.compile(name, lowered))
        return True

    def _put(self, program: Program, key: Hashable, executable: Callable) -> None:
        program.executables[key] = executable
        with self._counting:
            self._ready += 1

    def _report(self) -> None:
        self._progress(self._activity, self._ready, len(self._tasks))


def compile_threads() -> int:
    """Return the number of threads that compile at once."""
    return min(MAX_THREADS, processors())


def abstract(array: Any) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and sharding of an array; a numpy array has no sharding."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=getattr(array, "sharding", None))


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
