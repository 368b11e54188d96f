"""Stages of a real pipeline that take as long as a formula says, on virtual devices of the CPU."""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.core.step_load import Loads
from jaxserve.core.step_shapes import StepShape
from jaxserve.core.work import Work
from jaxserve.executor.executor import BlockExecutor
from jaxserve.executor.outputs import DispatchedStep
from jaxserve.sim.cost_model import TruePipelineCost


class DelayedStages:
    """A delay of each stage of an executor until its time by a formula is over, from when it could begin.

    A stage can begin a step when it has ended the one before and has its input. What it really computes must take less
    than the formula says. `late` are the times (s) by which stages ended too late, and `dispatch` those that the host
    took to dispatch a step.

    On CPU a program that calls Python runs in the thread that dispatches it if its arguments are ready. They never are:
    a program comes before it that takes some milliseconds.
    """

    def __init__(self, executor: BlockExecutor, cost: TruePipelineCost, stages: int):
        self.late: list[float] = []
        self.dispatch: list[float] = []
        self._cost, self._loads = cost, Loads(executor.buckets)
        self._seconds: Sequence[deque[float]] = [deque() for _ in range(stages)]  # of the steps to come, by stage
        self._inputs: Sequence[deque[float]] = [deque() for _ in range(stages + 1)]  # when they were there (s)
        self._ended = [0.0] * stages  # when each stage ended its last step (s)
        self._work, self._wait_on = jax.jit(_worked), jax.jit(self._waited, static_argnums=0)
        inner: Any = executor
        self._execute, self._run_stage = executor.execute, inner._run_stage
        inner.execute, inner._run_stage = self._counted, self._delayed

    def clear(self) -> None:
        """Forget the times of the steps so far."""
        self.late.clear()
        self.dispatch.clear()

    def __str__(self) -> str:
        host = statistics.median(self.dispatch)
        return (
            f"{host * 1e3:.1f} ms for the host to dispatch a step, the latest stage {max(self.late) * 1e3:.1f} ms late"
        )

    def _counted(self, work: Work) -> DispatchedStep:
        for seconds, stage in zip(self._seconds, self._cost.stages(self._loads.of(work)), strict=True):
            seconds.append(stage.seconds)
        self._inputs[0].append(begun := time.perf_counter())
        step = self._execute(work)
        self.dispatch.append(time.perf_counter() - begun)
        return step

    def _delayed(
        self, stage: int, shape: StepShape, packed: np.ndarray, x: Array | None
    ) -> tuple[Array, tuple[Array, ...]]:
        x, results = self._run_stage(stage, shape, packed, x)
        if not results:
            return self._after(stage, x), ()
        hidden, logits = results
        return x, (hidden, self._after(stage, logits))

    def _after(self, stage: int, values: Array) -> Array:
        return self._wait_on(stage, values, self._work(values))

    def _waited(self, stage: int, values: Array, worked: Array) -> Array:
        nothing = jax.pure_callback(partial(self._wait, stage), jax.ShapeDtypeStruct((), np.float32), worked)
        return values + nothing.astype(values.dtype)

    def _wait(self, stage: int, _: Array) -> np.ndarray:
        begun = max(self._inputs[stage].popleft(), self._ended[stage])
        end = begun + self._seconds[stage].popleft()
        left = end - time.perf_counter()
        if left > 0:
            time.sleep(left)
        self._ended[stage] = now = time.perf_counter()
        self.late.append(now - end)
        self._inputs[stage + 1].append(now)
        return np.float32(0)


def _worked(values: Array) -> Array:
    """Return a number, after products that take some milliseconds."""
    matrix = jnp.full((128, 128), values[0, 0], jnp.float32)
    return jax.lax.fori_loop(0, 60, lambda _, product: jnp.tanh(product @ matrix), matrix)[0, 0]
