"""Stages that take longer than they do, on their devices, and the times at which they ran."""

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.core.step_shapes import StepShape
from jaxserve.executor.executor import BlockExecutor
from tests.support.internals import wrap_stages

RunStage = Callable[..., tuple[Array, tuple[Array, ...]]]


class Interval(NamedTuple):
    """The time in which a stage was busy with a step."""

    start: float
    end: float


class SlowStages:
    """A delay of each stage of an executor, by programs on the stage's devices that follow those of the stage.

    On CPU a program that calls Python runs in the thread that dispatches it if its arguments are ready. They never are:
    a program comes before it that takes some milliseconds.
    """

    def __init__(self, executor: BlockExecutor, seconds: float):
        self.intervals: dict[int, list[Interval]] = defaultdict(list)  # by stage, in the order of the steps
        self._seconds = seconds
        self._work, self._wait_on = jax.jit(_worked), jax.jit(self._waited, static_argnums=0)
        wrap_stages(executor, partial(partial, self._run))

    def _run(
        self, run: RunStage, stage: int, shape: StepShape, packed: np.ndarray, x: Array | None
    ) -> tuple[Array, tuple[Array, ...]]:
        x, results = run(stage, shape, packed, x)
        if not results:
            return self._delayed(stage, x), ()
        hidden, logits = results
        return x, (hidden, self._delayed(stage, logits))

    def _delayed(self, stage: int, values: Array) -> Array:
        return self._wait_on(stage, values, self._work(values))

    def _waited(self, stage: int, values: Array, worked: Array) -> Array:
        nothing = jax.pure_callback(partial(self._wait, stage), jax.ShapeDtypeStruct((), np.float32), worked)
        return values + nothing.astype(values.dtype)

    def _wait(self, stage: int, _: Array) -> np.ndarray:
        start = time.perf_counter()
        time.sleep(self._seconds)
        self.intervals[stage].append(Interval(start, time.perf_counter()))
        return np.float32(0)


def _worked(values: Array) -> Array:
    """Return a number, after products that take some milliseconds."""
    matrix = jnp.full((128, 128), values[0, 0], jnp.float32)
    return jax.lax.fori_loop(0, 60, lambda _, product: jnp.tanh(product @ matrix), matrix)[0, 0]
