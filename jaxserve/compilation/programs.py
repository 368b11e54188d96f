"""Programs, and their compilation ahead of first use from the shapes of arguments alone, several at once."""

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from jaxserve.compilation.saved import SavedPrograms, signature
from jaxserve.core.machine import processors, trim_heap
from jaxserve.core.progress import COMPILING, LOADING, Progress, ignore_progress

MAX_THREADS = 16
GIVE_BACK_EVERY = 16  # executables: a compiler frees more than 1 MB for each, which it would keep


class Program:
    """A traced function (`jax.jit`) with its executables, each for arguments of certain shapes.

    Its name tells it from the other programs of an engine, with the shapes of its arguments.
    """

    def __init__(self, name: str, function: Any):
        self.name, self.function = name, function
        self.executables: dict[Hashable, Callable] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Traces the function, for shapes that nothing has been compiled for, or within another program."""
        return self.function(*arguments)

    def at(self, key: Hashable) -> Callable:
        """The executable that was compiled under a key; the function, where there is none.

        A call costs the same (9 us with 20 leaves on CPU, both).
        """
        return self.executables.get(key, self.function)

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """The program for such arguments, as `jax.jit` lowers it."""
        return self.function.lower(*arguments)


@dataclass(frozen=True)
class _Task:
    """An executable to be: of which program, under which key, for which arguments."""

    program: Program
    key: Hashable
    arguments: tuple
    static: tuple


class Compiler:
    """Compiles programs, or loads those that are saved, in threads of its own. For one thread at a time, but for
    `executable`.
    """

    def __init__(self, saved: SavedPrograms | None = None, progress: Progress = ignore_progress):
        self._saved = saved or SavedPrograms()
        self._progress = progress
        self._doing = LOADING  # until something has to be compiled
        self._tasks: dict[tuple[Program, Hashable], tuple[_Task, Future[bool]]] = {}
        self._results: dict[tuple[Program, Hashable], Any] = {}
        self._threads: ThreadPoolExecutor | None = None

    def compile(self, program: Program, key: Hashable, *arguments: Any, static: tuple = ()) -> Any:
        """Starts to compile a program for such arguments, unless it has been for this key. Returns outlines of its
        results: shapes and dtypes. Mutates.

        Lowers here and compiles there: lowering is Python, so threads would do it one after the other too, but in an
        order of chance. Mosaic numbers GPU kernels as they come, and the persistent cache would not know them again.
        """
        if (program, key) in self._results:
            return self._results[program, key]
        task = _Task(program, key, jax.tree.map(abstract, arguments), static)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(compile_threads(), "jaxserve-compile")
        name = signature(program.name, static, task.arguments)
        results = self._saved.outlines(name, task.arguments)
        if results is not None:
            future = self._threads.submit(self._load, task, name)
        else:
            self._doing = COMPILING
            lowered = program.lower(*task.arguments, *static)
            results = lowered.out_info
            future = self._threads.submit(self._compile, task, name, lowered)
        self._results[program, key] = results
        self._tasks[program, key] = task, future
        self._progress(self._doing, 0, len(self._tasks))
        return results

    def wait(self) -> None:
        """Waits until all executables are there; raises what failed. Mutates."""
        for number, (task, future) in enumerate(self._tasks.values(), start=1):
            if not future.result():  # it was saved, and could not be loaded
                name = signature(task.program.name, task.static, task.arguments)
                self._compile(task, name, task.program.lower(*task.arguments, *task.static))
            self._progress(self._doing, number, len(self._tasks))
            if number % GIVE_BACK_EVERY == 0:
                trim_heap()
        self._tasks.clear()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def executable(self, program: Program, *arguments: Any) -> Callable:
        """Loads or compiles a program for such arguments in the caller's thread."""
        name = signature(program.name, (), arguments)
        return self._saved.load(name, arguments) or self._saved.compile(name, program.lower(*arguments))

    def save(self) -> None:
        """Has the next start find what was compiled, once nothing is being compiled any more."""
        self._saved.write()

    def _load(self, task: _Task, name: str) -> bool:
        """Whether it could be."""
        loaded = self._saved.load(name, task.arguments)
        if loaded is not None:
            task.program.executables[task.key] = loaded
        return loaded is not None

    def _compile(self, task: _Task, name: str, lowered: jax.stages.Lowered) -> bool:
        task.program.executables[task.key] = self._saved.compile(name, lowered)
        return True


def compile_threads() -> int:
    """How many compile at once."""
    return min(MAX_THREADS, processors())


def abstract(array: Any) -> jax.ShapeDtypeStruct:
    """An array without its values; one of the host's is on no device yet."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=getattr(array, "sharding", None))
