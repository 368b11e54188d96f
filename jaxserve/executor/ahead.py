"""Compilation ahead of first use from the shapes of arguments alone, several functions at once."""

import os
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from jaxserve.executor.blocks import abstract
from jaxserve.hardware import give_back_memory

MOST_THREADS = 16
GIVE_BACK_EVERY = 16  # executables: a compiler frees more than 1 MB for each, which it would keep

Call = tuple[Any, tuple]
"""A traced function (`jax.jit`) and its arguments, or their shapes and shardings."""


def compile_all(calls: Iterable[Call]) -> None:
    """Compiles what these calls need, and waits for it: JAX finds it when they are made. Raises what failed."""
    with _threads() as threads:
        futures = [_start(threads, function, arguments) for function, arguments in calls]
        for number, future in enumerate(futures, start=1):
            future.result()
            if number % GIVE_BACK_EVERY == 0:
                give_back_memory()


def compile_threads() -> int:
    """How many compile at once."""
    return min(MOST_THREADS, os.cpu_count() or 1)


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(compile_threads(), "jaxserve-compile")


def _start(threads: ThreadPoolExecutor, function: Any, arguments: tuple) -> Future[Callable]:
    """Lowers here and compiles there.

    Lowering is Python, so threads would do it one after the other too, but in an order of chance: Mosaic numbers GPU
    kernels as they come, and the persistent cache would not know them again.
    """
    return threads.submit(function.lower(*arguments).compile)


class CompiledAhead:
    """Executables by what they are for.

    For what is never run before it is needed: pools that have grown need memory that is there only when layers have
    given it. A call costs what one of the traced function costs (9 us with 20 leaves on CPU, both).
    """

    def __init__(self) -> None:
        self._compiled: dict[Hashable, Future[Callable]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def compile(self, key: Hashable, function: Any, *arguments: Any) -> None:
        """Lowers a traced function (`jax.jit`) for such arguments and starts to compile it, unless that has been done.

        Mutates.
        """
        if key not in self._compiled:
            if self._threads is None:
                self._threads = _threads()
            self._compiled[key] = _start(self._threads, function, jax.tree.map(abstract, arguments))

    def find(self, key: Hashable) -> Callable | None:
        """The executable, once it is there. Raises what failed."""
        future = self._compiled.get(key)
        return future.result() if future is not None else None

    def wait(self) -> None:
        """Waits for all compilations; raises what failed."""
        for future in self._compiled.values():
            future.result()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
