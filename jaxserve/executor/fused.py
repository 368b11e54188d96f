"""The fused tier: the decoder layers of a stage as one executable.

An optimisation that may be absent at any time: steps go block by block where there is none. An executable belongs to a
step shape and to what the layers run, so it is found again when a mixture of precisions returns. For steps that only
decode they may be compiled at warm-up; others in a background thread, once a shape has been used often since the last
change of the block table.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax
from jax import Array

from jaxserve.executor.blocks import Executable, Row, RowOutline, abstract
from jaxserve.executor.compilation import CompileCounter
from jaxserve.executor.shapes import StepShape
from jaxserve.kernels import Pool

log = logging.getLogger(__name__)

PATIENCE = 32  # uses of a shape before it is worth fusing in the background
KEPT = 256  # executables

Key = tuple[int, StepShape, tuple[Executable, ...], int]  # stage number, shape, what its layers run, segments of pools
Fused = Callable[..., tuple[Array, tuple[Pool, ...]]]


class FusedTier:
    """Fused executables by stage, step shape, the executables of the layers and the segments of their pools."""

    def __init__(self, counter: CompileCounter, *, patience: int | None = PATIENCE, at_warmup: bool = False):
        """`patience`: uses after which a shape is compiled in the background; None: never. `at_warmup`: whether the
        executor is to compile, while it warms up, the shapes of steps that only decode.
        """
        self.at_warmup = at_warmup
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

    def used(self, key: Key, rows: Sequence[Row], x: Array, context: Sequence[object], pools: Sequence[Pool]) -> None:
        """Notes that a step ran block by block; starts to compile the shape when it has done so often, and
        the oldest give way. Mutates.
        """
        if self._patience is None:
            return
        self._uses[key] += 1
        if self._uses[key] == self._patience:
            self.compile(key, [row.outline() for row in rows], x, context, pools)
            while len(self._compiled) > KEPT:
                self._compiled.pop(next(iter(self._compiled))).cancel()

    def compile(
        self, key: Key, rows: Sequence[RowOutline], x: Array, context: Sequence[object], pools: Sequence[Pool]
    ) -> None:
        """Starts to compile a shape for such rows and arguments, unless it has been. Mutates."""
        if key in self._compiled:
            return
        shapes = jax.tree.map(abstract, (x, tuple(context), tuple(pools)))
        leaves = tuple(row.leaves for row in rows)
        self._compiled[key] = self._pool.submit(_compile, tuple(row.executable for row in rows), *shapes, leaves)

    def table_changed(self) -> None:
        """Begins to count anew; what has not begun to compile may never be needed. Mutates."""
        self._uses.clear()
        for key in [key for key, future in self._compiled.items() if future.cancel()]:
            del self._compiled[key]

    def wait(self) -> None:
        """Waits for the compilations that are under way."""
        wait(self._compiled.values())

    def close(self) -> None:
        """Drops what has not begun to compile, and waits for what has."""
        self._pool.shutdown(cancel_futures=True)
        self._compiled.clear()

    def _mark_thread(self) -> None:
        self._counter.fusing_threads.add(threading.get_ident())


def _compile(executables: Sequence[Callable], x, context, pools, leaves) -> Fused:
    def fused(x: Array, context: tuple, pools: tuple[Pool, ...], leaves: tuple[tuple[Array, ...], ...]):
        written = []
        for executable, pool, own in zip(executables, pools, leaves, strict=True):
            x, pool = executable(x, *context, pool, *own)
            written.append(pool)
        return x, tuple(written)

    placed = jax.tree.map(lambda array: array.sharding, (x, pools))  # results lie as the arguments do
    try:
        return jax.jit(fused, donate_argnums=2, out_shardings=placed).lower(x, context, pools, leaves).compile()
    except Exception:
        log.exception("fusing failed; steps go on block by block")
        raise
