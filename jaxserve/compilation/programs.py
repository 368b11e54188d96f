"""Programs, and their parallel compilation ahead of the first use, from the shapes of arguments alone."""

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from jaxserve.compilation.saved import SavedPrograms, signature
from jaxserve.core.machine import processors, trim_heap
from jaxserve.core.progress import COMPILING, LOADING, Progress, ignore_progress

MAX_THREADS = 16
# Executables between two trims of the heap: each compilation leaves more than 1 MB of freed memory in the process.
TRIM_EVERY = 16


class Program:
    """A jitted function with its executables, each for arguments of certain shapes.

    The name and the shapes of the arguments together identify a program in an engine.
    """

    def __init__(self, name: str, function: Any):
        self.name, self.function = name, function
        self.executables: dict[Hashable, Callable] = {}

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


@dataclass(frozen=True)
class _Task:
    """An executable to compile or load."""

    program: Program
    key: Hashable
    arguments: tuple
    static: tuple


class Compiler:
    """A compiler with its own threads, which loads saved programs if it can. Only `executable` is thread-safe."""

    def __init__(self, saved: SavedPrograms | None = None, progress: Progress = ignore_progress):
        self._saved = saved or SavedPrograms()
        self._progress = progress
        self._activity = LOADING  # until something has to be compiled
        self._tasks: dict[tuple[Program, Hashable], tuple[_Task, Future[bool]]] = {}
        self._results: dict[tuple[Program, Hashable], Any] = {}
        self._threads: ThreadPoolExecutor | None = None

    def compile(self, program: Program, key: Hashable, *arguments: Any, static: tuple = ()) -> Any:
        """Start to compile a program for these arguments under `key`, unless that was started before.

        Return the abstract results. Raise what lowering raises.
        """
        if (program, key) in self._results:
            return self._results[program, key]
        task = _Task(program, key, jax.tree.map(abstract, arguments), static)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(compile_threads(), "jaxserve-compile")
        name = signature(program.name, static, task.arguments)
        results = self._saved.abstract_results(name, task.arguments)
        if results is not None:
            future = self._threads.submit(self._load, task, name)
        else:
            self._activity = COMPILING
            # Lowered here, not in the threads: lowering is Python, so threads would not be faster but would have a
            # random order. Mosaic numbers GPU kernels in the order of lowering, so that a later start would not find
            # them in the persistent cache.
            lowered = program.lower(*task.arguments, *static)
            results = lowered.out_info
            future = self._threads.submit(self._compile, task, name, lowered)
        self._results[program, key] = results
        self._tasks[program, key] = task, future
        self._progress(self._activity, 0, len(self._tasks))
        return results

    def wait(self) -> None:
        """Wait until all started executables are ready, and raise the first error among them."""
        for index, (task, future) in enumerate(self._tasks.values(), start=1):
            if not future.result():  # a saved executable that could not be loaded
                name = signature(task.program.name, task.static, task.arguments)
                self._compile(task, name, task.program.lower(*task.arguments, *task.static))
            self._progress(self._activity, index, len(self._tasks))
            if index % TRIM_EVERY == 0:
                trim_heap()
        self._tasks.clear()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def executable(self, program: Program, *arguments: Any) -> Callable:
        """Load or compile a program for these arguments in the caller's thread."""
        name = signature(program.name, (), arguments)
        return self._saved.load(name, arguments) or self._saved.compile(name, program.lower(*arguments))

    def save(self) -> None:
        """Save an index of the executables in JAX's cache for the next start. Nothing may be compiling."""
        self._saved.write()

    def _load(self, task: _Task, name: str) -> bool:
        loaded = self._saved.load(name, task.arguments)
        if loaded is not None:
            task.program.executables[task.key] = loaded
        return loaded is not None

    def _compile(self, task: _Task, name: str, lowered: jax.stages.Lowered) -> bool:
        task.program.executables[task.key] = self._saved.compile(name, lowered)
        return True


def compile_threads() -> int:
    """Return the number of threads that compile at once."""
    return min(MAX_THREADS, processors())


def abstract(array: Any) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and sharding of an array; a numpy array has no sharding."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=getattr(array, "sharding", None))
