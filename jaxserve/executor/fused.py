"""The fused tier: what a stage does in a step as one executable, from the step's packed inputs to the logits.

An optimisation that may be absent at any time: steps go block by block where there is none. An executable belongs to a
step shape and to what the layers run, so it is found again when a mixture of precisions returns. For steps that only
decode they may be compiled at warm-up; others in a background thread, once a shape has been used often since the last
change of the block table.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from jaxserve.compilation.cache import CompileCounter
from jaxserve.compilation.programs import Compiler, Program, abstract, compile_threads
from jaxserve.core.step_shapes import StepShape
from jaxserve.kernels import Pool

log = logging.getLogger(__name__)

PATIENCE = 32  # uses of a shape before it is worth fusing in the background
KEPT = 256  # executables

Key = tuple[int, StepShape, tuple[Program, ...], int]  # stage number, shape, what its layers run, segments of pools
Fused = Callable[..., tuple[Array, tuple[Array, ...], tuple[Pool, ...]]]


@dataclass(frozen=True)
class StageProgram:
    """What a stage runs in a step of one shape: the executables of its blocks, one after the other."""

    inputs: Program  # `BlockBuilder.step_inputs`
    shape: StepShape
    embed: Program | None
    layers: tuple[Program, ...]
    head: Program | None

    @property
    def name(self) -> str:
        """Tells it from other programs of the same engine."""
        parts = (self.embed, *self.layers, self.head)
        return repr((self.shape, [None if part is None else part.name for part in parts]))

    def __call__(
        self, packed: Array, carried: Array, pools: tuple[Pool, ...], leaves: tuple[tuple[Array, ...], ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Pool, ...]]:
        """x [T, E], the head's results (none without a head), and the pools.

        `carried` are the newest tokens i32[slots] for the embedding, or x of the stage before; `leaves` those of every
        block in order.
        """
        tokens, rows, *context = self.inputs(packed, self.shape)
        of_blocks = iter(leaves)
        x = carried if self.embed is None else self.embed(tokens, carried, *next(of_blocks))
        written = []
        for layer, pool in zip(self.layers, pools, strict=True):
            x, pool = layer(x, *context, pool, *next(of_blocks))
            written.append(pool)
        results = () if self.head is None else self.head(x, rows, *next(of_blocks))
        return x, results, tuple(written)


class FusedTier:
    """Fused executables by stage, step shape, the executables of the layers and the segments of their pools."""

    def __init__(
        self,
        counter: CompileCounter,
        *,
        patience: int | None = PATIENCE,
        at_warmup: bool = False,
        compiler: Compiler | None = None,
    ):
        """`patience`: uses after which a shape is compiled in the background; None: never. `at_warmup`: whether the
        executor is to compile, while it warms up, the shapes of steps that only decode.
        """
        self.at_warmup = at_warmup
        self._counter = counter
        self._compiler = compiler or Compiler()
        self._patience = patience
        self._uses: Counter[Key] = Counter()
        self._compiled: dict[Key, Future[None]] = {}
        self._ready: dict[Key, Fused] = {}
        threads = compile_threads() if patience is None else 1  # while the engine serves, steps need the cores
        self._pool = ThreadPoolExecutor(threads, "jaxserve-fuse", initializer=self._mark_thread)

    def find(self, key: Key) -> Fused | None:
        """The executable of a `StageProgram`, if it is ready. Never waits."""
        return self._ready.get(key)

    def used(self, key: Key) -> bool:
        """Notes that a step ran block by block. Whether it has done so often enough to be compiled now. Mutates."""
        if self._patience is None:
            return False
        self._uses[key] += 1
        return self._uses[key] == self._patience

    def compile(self, key: Key, program: StageProgram, *arguments: Any) -> None:
        """Starts to compile a stage's program for such arguments, unless it has been; the oldest give way. Mutates."""
        if key not in self._compiled:
            self._compiled[key] = self._pool.submit(self._compile, key, program, *jax.tree.map(abstract, arguments))
            while self._patience is not None and len(self._compiled) > KEPT:
                oldest = next(iter(self._compiled))
                self._compiled.pop(oldest).cancel()
                self._ready.pop(oldest, None)

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
        self._ready.clear()

    def _mark_thread(self) -> None:
        self._counter.fusing_threads.add(threading.get_ident())

    def _compile(self, key: Key, program: StageProgram, packed, carried, pools, leaves) -> None:
        placed = jax.tree.map(lambda array: array.sharding, pools)  # results lie as the arguments do
        shardings = (packed.sharding, packed.sharding, placed)
        try:
            jitted = jax.jit(program.__call__, donate_argnums=2, out_shardings=shardings)
            whole = Program(program.name, jitted)
            self._ready[key] = self._compiler.executable(whole, packed, carried, pools, leaves)
        except Exception:
            log.exception("fusing failed; steps go on block by block")
            raise
