"""The engine's own step loop with a stopwatch in it: what each step is, and where the host's time goes."""

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
    """One step: its work, what the host did for it in seconds, and when its tokens were there.

    begin: admission, batching, paging. dispatch: packing the inputs and calling the executables, without waiting.
    wait: for the device, with the transfer of the tokens. finish: tokens, stops, text, telemetry, outputs.
    """

    step: int
    decodes: int
    prefill_tokens: int
    begin_s: float
    dispatch_s: float = math.nan
    finish_s: float = math.nan
    done_s: float = math.nan  # on the clock

    @property
    def host_s(self) -> float:
        """What Python adds between two steps."""
        return self.begin_s + self.dispatch_s + self.finish_s


class StepRecord:
    """The steps of one loop, in order. Filled in by the loop's parts."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self.steps: list[StepTimes] = []
        self._open: dict[int, StepTimes] = {}

    def begun(self, work: Work, seconds: float) -> None:
        """Mutates: a step has begun."""
        prefill = sum(chunk.length for chunk in work.chunks)
        self._open[work.step] = StepTimes(work.step, len(work.decodes), prefill, seconds)

    def of(self, work: Work) -> StepTimes:
        """The times of a step that is not finished."""
        return self._open[work.step]

    def finished(self, work: Work, seconds: float) -> None:
        """Mutates: a step's tokens have been taken in."""
        times = self._open.pop(work.step)
        times.finish_s = seconds
        self.steps.append(times)

    def take(self) -> list[StepTimes]:
        """The finished steps since the last call. Mutates."""
        taken, self.steps = self.steps, []
        return taken


class _TimedCore:
    """An `EngineCore` whose `schedule` and `update` are timed; everything else is the core's own."""

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
    """An `Executor` whose dispatches and fetches are timed."""

    executor: Executor
    record: StepRecord

    def execute(self, work: Work) -> "_TimedPending":
        start = self.record.clock.now()
        pending = self.executor.execute(work)
        times = self.record.of(work)
        times.dispatch_s = self.record.clock.now() - start
        return _TimedPending(pending, times, self.record.clock)

    def settle(self) -> None:
        self.executor.settle()


@dataclass(frozen=True)
class _TimedPending:
    """A `PendingStep` whose fetch is timed."""

    pending: PendingStep
    times: StepTimes
    clock: Clock

    def fetch(self) -> StepOutput:
        output = self.pending.fetch()
        self.times.done_s = self.clock.now()
        return output


def timed(loop: StepLoop) -> tuple[StepLoop, StepRecord]:
    """The same loop over the same core and executor, and the record that it fills."""
    record = StepRecord(loop.clock)
    core = cast(EngineCore, _TimedCore(loop.core, record))
    return StepLoop(core, _TimedExecutor(loop.executor, record), loop.clock, overlap=loop.overlap), record


def decode_steps(steps: Iterable[StepTimes], batch: int) -> list[StepTimes]:
    """The steps that did nothing but decode `batch` sequences."""
    return [step for step in steps if step.decodes == batch and not step.prefill_tokens]


def periods(steps: Sequence[StepTimes], batch: int | None = None) -> list[float]:
    """Seconds from one step's tokens to the next one's; with `batch`, only between two decode steps of that size."""
    kept = steps if batch is None else decode_steps(steps, batch)
    return [after.done_s - before.done_s for before, after in pairwise(kept) if after.step == before.step + 1]


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which a share of the values lies, interpolated; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def scaled(value: float | None, factor: float, digits: int = 3) -> float | None:
    """A value in another unit, rounded for a table; None stays None."""
    return None if value is None else round(value * factor, digits)
