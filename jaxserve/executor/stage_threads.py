"""StageThreads: the threads that dispatch the stages of a pipeline, on platforms that need one for each stage."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class StageThreads:
    """A thread for each stage but the first, which the caller dispatches itself.

    On CPU, programs that one thread dispatches run one after another, even on different devices: stages would compute
    in turn. Callers wait until a function has dispatched its programs, not for their results, so that one thread at a
    time changes what the stages share.
    """

    def __init__(self, stages: int):
        """Make the threads of this many stages. Those beyond need none."""
        self._pools = {stage: ThreadPoolExecutor(1, f"jaxserve-stage-{stage}") for stage in range(1, stages)}

    def run(self, stage: int, function: Callable[..., T], *arguments: Any) -> T:
        """Return what a function returns or raises in a stage's thread."""
        pool = self._pools.get(stage)
        return function(*arguments) if pool is None else pool.submit(function, *arguments).result()

    def close(self) -> None:
        """End the threads."""
        for pool in self._pools.values():
            pool.shutdown()
