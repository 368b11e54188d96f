"""Stages that take longer than they do, on their devices, and the times at which they ran."""

import time
from collections import defaultdict
from functools import partial
from itertools import count
from typing import NamedTuple

import jax
import numpy as np
from jax import Array

from jaxserve.core.step_shapes import StepShape
from jaxserve.executor.executor import BlockExecutor


class Interval(NamedTuple):
    """The time in which a stage was busy with a step."""

    start: float
    end: float


class SlowStages:
    """A delay of each stage of an executor, as a program on the stage's devices that follows those of the stage."""

    def __init__(self, executor: BlockExecutor, seconds: float):
        self.intervals: dict[int, list[Interval]] = defaultdict(list)  # by stage, in the order of the steps
        self._seconds = seconds
        self._run_stage = executor._run_stage
        self._numbers = defaultdict(count)
        self._delay = jax.jit(self._delayed, static_argnums=0)
        executor._run_stage = self.run_stage  # type: ignore[method-assign]

    def run_stage(
        self, stage: int, shape: StepShape, packed: np.ndarray, x: Array | None
    ) -> tuple[Array, tuple[Array, ...]]:
        x, results = self._run_stage(stage, shape, packed, x)
        if not results:
            return self._delay(stage, x), ()
        hidden, logits = results
        return x, (hidden, self._delay(stage, logits))

    def _delayed(self, stage: int, values: Array) -> Array:
        nothing = jax.pure_callback(partial(self._wait, stage), jax.ShapeDtypeStruct((), np.float32), values[0, 0])
        return values + nothing.astype(values.dtype)

    def _wait(self, stage: int, _: Array) -> np.ndarray:
        start = time.perf_counter()
        time.sleep(self._seconds)
        self.intervals[stage].append(Interval(start, time.perf_counter()))
        return np.float32(0)
