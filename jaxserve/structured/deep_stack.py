"""Calls in a thread with a large stack, for libraries that follow nested input by recursion."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

# llguidance takes up to 10 KB for each level of a schema or grammar, also where a definition refers to another one, and
# ends the process if its stack is full. The longest grammar (`MAX_GRAMMAR`) has at most some 30,000 levels. Only what
# is used of a stack takes memory.
STACK_SIZE = 512 << 20  # bytes
CONCURRENT = 4  # calls at a time, which bounds the memory

_starting = threading.Lock()
_room = threading.Semaphore(CONCURRENT)


def with_deep_stack(call: Callable[..., T], *args: Any) -> T:
    """Return what `call` returns, or raise what it raises, in a thread with a large stack."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call(*args))
        except BaseException as error:
            result.set_exception(error)

    with _room:
        thread = _started(run)
        thread.join()
    return result.result()


def _started(run: Callable[[], None]) -> threading.Thread:
    with _starting:  # the size holds for all threads that are started meanwhile
        usual = threading.stack_size(STACK_SIZE)
        try:
            thread = threading.Thread(target=run, name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(usual)
    return thread
