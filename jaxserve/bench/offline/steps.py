"""The engine's step loop with timers: the work of each step, and the host's time for it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

from jaxserve.core.clock import Clock
from jaxserve.core.request import RequestOutput
from jaxserve.core.work import Executor, PendingStep, StepOutput, Work
from jaxserve.engine.core import EngineCore
from jaxserve.engine.loop import StepLoop


@dataclass
class StepTimes:
    """One step: its work, the host's seconds for it, and when its tokens arrived.

    begin: admission, batching, paging. dispatch: packing the inputs and calling the executables, without waiting.
    finish: tokens, stops, text, telemetry, outputs.
    """

    step: int
    decodes: int
    prefill_tokens: int
    begin_s: float
    dispatch_s: float = math.nan
    finish_s: float = math.nan
    done_s: float = math.nan  # clock time at which the tokens arrived

    @property
    def host_s(self) -> float:
        """The time that Python takes for the step."""
        return self.begin_s + self.dispatch_s + self.finish_s


class StepRecord:
    """The steps of one loop in order, filled in by the loop's timed parts."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self.steps: list[StepTimes] = []
        self._open: dict[int, StepTimes] = {}

    def begun(self, work: Work, seconds: float) -> None:
        """Record that a step has begun."""
        prefill = sum(chunk.length for chunk in work.chunks)
        self._open[work.step] = StepTimes(work.step, len(work.decodes), prefill, seconds)

    def of(self, work: Work) -> StepTimes:
        """Return the times of an unfinished step."""
        return self._open[work.step]

    def finished(self, work: Work, seconds: float) -> None:
        """Record that a step has finished."""
        times = self._open.pop(work.step)
        times.finish_s = seconds
        self.steps.append(times)

    def take(self) -> list[StepTimes]:
        """Return the finished steps since the last call."""
        taken, self.steps = self.steps, []
        return taken


class _TimedCore:
    """An `EngineCore` with timed `schedule` and `update`; everything else is delegated to the core."""

    def __init__(self, core: EngineCore, record: StepRecord):
        self._core = core
        self._record = record

    def schedule(self, now: float) -> Work:
        start = self._record.clock.now()
        work = self._core.schedule(now)
        if work:
            self._record.begun(work, self._record.clock.now() - start)
        return work

    def update(self, work: Work, output: StepOutput, now: float) -> list[RequestOutput]:
        start = self._record.clock.now()
        outputs = self._core.update(work, output, now)
        self._record.finished(work, self._record.clock.now() - start)
        return outputs

    def __getattr__(self, name: str) -> object:
        return getattr(self._core, name)


@dataclass(frozen=True)
class _TimedExecutor:
    executor: Executor
    record: StepRecord

    def execute(self, work: Work) -> "_TimedPending":
        start = self.record.clock.now()
        pending = self.executor.execute(work)
        times = self.record.of(work)
        times.dispatch_s = self.record.clock.now() - start
        return _TimedPending(pending, times, self.record.clock)


@dataclass(frozen=True)
class _TimedPending:
    pending: PendingStep
    times: StepTimes
    clock: Clock

    def fetch(self) -> StepOutput:
        output = self.pending.fetch()
        self.times.done_s = self.clock.now()
        return output


def timed(loop: StepLoop) -> tuple[StepLoop, StepRecord]:
    """Return a loop over the same core and executor with timers, and the record that it fills."""
    record = StepRecord(loop.clock)
    core = cast(EngineCore, _TimedCore(loop.core, record))
    executor = _TimedExecutor(loop.executor, record)
    return StepLoop(core, executor, loop.clock, overlap=loop.overlap, stages=loop.stages), record


def decode_steps(steps: Iterable[StepTimes], batch: int) -> list[StepTimes]:
    """Return the steps that only decode `batch` sequences."""
    return [step for step in steps if step.decodes == batch and not step.prefill_tokens]


def periods(steps: Sequence[StepTimes], batch: int | None = None) -> list[float]:
    """Return the seconds from each step's tokens to the next one's; with `batch`, only between its decode steps."""
    counted = steps if batch is None else decode_steps(steps, batch)
    return [after.done_s - before.done_s for before, after in pairwise(counted) if after.step == before.step + 1]


def sample_quantile(values: Sequence[float], share: float) -> float | None:
    """Return a quantile (`share` from 0 to 1) of the values, interpolated linearly, or None without values."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def scaled(value: float | None, factor: float, digits: int = 3) -> float | None:
    """Return a value in another unit, rounded for a table; None stays None."""
    return None if value is None else round(value * factor, digits)
