"""The fused tier: the decoder layers of a stage as one executable, compiled behind the server's back.

An optimisation that may be absent at any time. A step shape that has been used often enough since the last change of
the block table is compiled in a background thread; steps go on block by block until the executable is ready.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
from jax import Array

from jaxserve.executor.blocks import Row
from jaxserve.executor.compilation import CompileCounter
from jaxserve.executor.shapes import StepShape

log = logging.getLogger(__name__)

PATIENCE = 32  # uses of a shape before it is worth fusing

Key = tuple[int, StepShape]  # stage number, shape
Fused = Callable[..., tuple[Array, tuple[Array, ...]]]


class FusedTier:
    """Fused executables by stage and step shape, for the block table as it is now."""

    def __init__(self, counter: CompileCounter, *, patience: int = PATIENCE):
        self._counter = counter
        self._patience = patience
        self._uses: Counter[Key] = Counter()
        self._compiled: dict[Key, Future[Fused]] = {}
        self._pool = ThreadPoolExecutor(1, "jaxserve-fuse", initializer=self._mark_thread)

    def find(self, key: Key) -> Fused | None:
        """The executable (x, context, pools, leaves of each row) -> (x, pools), if it is ready. Never waits."""
        future = self._compiled.get(key)
        if future is None or not future.done() or future.exception() is not None:
            return None
        return future.result()

    def used(self, key: Key, rows: Sequence[Row], x: Array, context: Sequence[object], pools: Sequence[Array]) -> None:
        """Notes that a step ran block by block; starts to compile the shape when it has done so often. Mutates."""
        self._uses[key] += 1
        if self._uses[key] == self._patience:
            leaves = tuple(row.leaves for row in rows)
            shapes = jax.tree.map(_abstract, (x, tuple(context), tuple(pools), leaves))
            executables = tuple(row.executable for row in rows)
            self._compiled[key] = self._pool.submit(_compile, executables, *shapes)

    def invalidate(self) -> None:
        """Forgets everything: the block table has changed. Mutates."""
        for future in self._compiled.values():
            future.cancel()
        self._compiled.clear()
        self._uses.clear()

    def wait(self) -> None:
        """Waits for the compilations that are under way."""
        for future in self._compiled.values():
            future.exception()

    def close(self) -> None:
        """Drops what has not begun to compile, and waits for what has."""
        self._pool.shutdown(cancel_futures=True)
        self.invalidate()

    def _mark_thread(self) -> None:
        self._counter.fusing_threads.add(threading.get_ident())


def _abstract(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _compile(executables: Sequence[Callable], x, context, pools, leaves) -> Fused:
    def fused(x: Array, context: tuple, pools: tuple[Array, ...], leaves: tuple[tuple[Array, ...], ...]):
        written = []
        for executable, pool, own in zip(executables, pools, leaves, strict=True):
            x, pool = executable(x, *context, pool, *own)
            written.append(pool)
        return x, tuple(written)

    try:
        return jax.jit(fused, donate_argnums=2).lower(x, context, pools, leaves).compile()
    except Exception:
        log.exception("fusing failed; steps go on block by block")
        raise
