"""The fused tier: one executable for all that a stage does in a step, from the packed inputs to the logits.

It is an optimisation that may be missing at any time: steps then run block by block. An executable belongs to a step
shape and to the executables of the layers, so that it is found again when an assignment of precisions returns. It is
compiled at warm-up, for steps that only decode.
"""

import logging
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import Array

from jaxserve.compilation.cache import FUSED_TIER, CompileCounter
from jaxserve.compilation.programs import Compiler, Program, abstract, compile_threads
from jaxserve.core.step_shapes import StepShape
from jaxserve.kernels import Pool

log = logging.getLogger(__name__)

Fused = Callable[..., tuple[Array, tuple[Array, ...], tuple[Pool, ...]]]


class StageKey(NamedTuple):
    """The identity of a fused executable."""

    index: int  # of the stage
    shape: StepShape
    layers: tuple[Program, ...]  # the programs of the decoder layers
    segments: int  # of each KV pool


@dataclass(frozen=True)
class StageProgram:
    """The programs of a stage's blocks, one after another, for a step of one shape."""

    inputs: Program  # `BlockBuilder.step_inputs`
    shape: StepShape
    embed: Program | None
    layers: tuple[Program, ...]
    head: Program | None

    @property
    def name(self) -> str:
        """A name that differs from those of other programs of the engine."""
        parts = (self.embed, *self.layers, self.head)
        return repr((self.shape, [None if part is None else part.name for part in parts]))

    def __call__(
        self, packed: Array, carried: Array, pools: tuple[Pool, ...], leaves: tuple[tuple[Array, ...], ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Pool, ...]]:
        """Return x [T, E], the results of the head (none without a head), and the pools.

        `carried` holds the newest tokens i32[slots] if the stage has an embedding, and x of the previous stage if not.
        `leaves` holds the leaves of every block in order.
        """
        tokens, rows, *context = self.inputs(packed, self.shape)
        block_leaves = iter(leaves)
        x = carried if self.embed is None else self.embed(tokens, carried, *next(block_leaves))
        written = []
        for layer, pool in zip(self.layers, pools, strict=True):
            x, pool = layer(x, *context, pool, *next(block_leaves))
            written.append(pool)
        results = () if self.head is None else self.head(x, rows, *next(block_leaves))
        return x, results, tuple(written)


class FusedPrograms:
    """The fused executables of all instances, by stage and by the shapes of what they are called with. Thread-safe."""

    def __init__(self) -> None:
        self._executables: dict[Hashable, Fused] = {}

    def find(self, key: Hashable) -> Fused | None:
        """Return the executable for a key of `shared_key`, or None if there is none."""
        return self._executables.get(key)

    def compile(self, program: StageProgram, arguments: tuple, compiler: Compiler) -> Fused:
        """Return the executable of a stage for abstract arguments, compiled in the caller's thread if it is missing."""
        key = shared_key(program, arguments)
        if key not in self._executables:
            packed, _, pools, _ = arguments
            # Results have the shardings of the arguments.
            shardings = (packed.sharding, packed.sharding, jax.tree.map(lambda array: array.sharding, pools))
            jitted = jax.jit(program.__call__, donate_argnums=2, out_shardings=shardings)
            self._executables[key] = compiler.executable(Program(program.name, jitted), *arguments)
        return self._executables[key]


def shared_key(program: StageProgram, arguments: tuple) -> Hashable:
    """Return what identifies the executable of a stage for these arguments, in any instance."""
    _, carried, pools, _ = arguments  # the shapes of the others follow from the program
    return program, carried.shape, tuple(segment.shape for segment in pools[0]) if pools else None


class FusedTier:
    """The fused executables of an executor, and the threads that compile them before the executor serves.

    Nothing is compiled while steps run: on CPU they need the cores, and on GPU compiling tries kernels on the device.
    """

    def __init__(
        self, counter: CompileCounter, *, compiler: Compiler | None = None, programs: FusedPrograms | None = None
    ):
        """Take the executables that other executors have compiled: `programs`."""
        self._compiler = compiler or Compiler()
        self._programs = programs or FusedPrograms()
        self._compiled: dict[StageKey, Future[None]] = {}
        self._ready: dict[StageKey, Fused] = {}
        self._missing: set[StageKey] = set()  # what no executor had compiled at its first use
        # Threads keep their initializer: one of this object's own would keep the executor and its weights as well.
        mark, tier = counter.count_thread_as, (FUSED_TIER,)
        self._pool = ThreadPoolExecutor(compile_threads(), "jaxserve-fuse", initializer=mark, initargs=tier)

    def find(self, key: StageKey) -> Fused | None:
        """Return the executable for a key if it is ready. This never waits."""
        return self._ready.get(key)

    def seek(self, key: StageKey, outline: Callable[[], tuple[StageProgram, tuple]]) -> Fused | None:
        """Return what another executor has compiled for a stage for which nothing is ready.

        `outline` returns the stage's program and its abstract arguments. That takes a moment, so that it is called at
        the first use of a key alone, until layers are replaced.
        """
        if key in self._missing:
            return None
        found = self._programs.find(shared_key(*outline()))
        if found is None:
            self._missing.add(key)
        else:
            self._ready[key] = found
        return found

    def compile(self, key: StageKey, program: StageProgram, *arguments: Any) -> None:
        """Start to compile a stage for arguments of these shapes, unless that was started before."""
        if key not in self._compiled:
            self._compiled[key] = self._pool.submit(self._compile, key, program, jax.tree.map(abstract, arguments))

    def blocks_changed(self) -> None:
        """Look once more for what other executors have compiled."""
        self._missing.clear()

    def wait(self) -> None:
        """Wait for the compilations that were started."""
        wait(self._compiled.values())

    def close(self) -> None:
        """Drop the compilations that have not begun, and wait for the others."""
        self._pool.shutdown(cancel_futures=True)
        self._compiled.clear()
        self._ready.clear()

    def _compile(self, key: StageKey, program: StageProgram, arguments: tuple) -> None:
        try:
            self._ready[key] = self._programs.compile(program, arguments, self._compiler)
        except Exception:
            log.exception("fusing a stage failed: steps run block by block")
            raise
