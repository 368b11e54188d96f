"""OfflineEngine: an engine built like the library's, with timed steps and counted compilations."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from jaxserve.bench.offline.steps import StepTimes, timed
from jaxserve.build import build
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.client import ModelInfo, Prompt, TokensPrompt
from jaxserve.engine.sync_engine import SyncEngine

Job = tuple[Prompt, SamplingParams]


@dataclass(frozen=True)
class RunFigures:
    """Figures of a set of requests, from the first one's arrival to the last one's end."""

    seconds: float
    finished: int  # requests
    input_tokens: int  # of finished requests
    output_tokens: int  # of all requests, finished or not
    steps: tuple[tuple[StepTimes, ...], ...]  # one inner tuple for each instance
    compilations: int
    preemptions: int
    interrupted: bool = False


class OfflineEngine:
    """A loaded engine that runs sets of requests. It is a context manager."""

    def __init__(self, config: EngineConfig):
        """Raise ConfigError, CheckpointError or MemoryBudgetError."""
        self._built = build(config)
        self._loops, self._records = zip(*map(timed, self._built.instances), strict=True)
        loops = dict(zip(self._built.loops, self._loops, strict=True))
        self._engine = SyncEngine(loops, self._built.info, self._built.tokenizer, self._built.clock)
        # One thread for all runs: the first step of a new thread takes longer.
        self._thread = ThreadPoolExecutor(1, "jaxserve-steps")

    @property
    def info(self) -> ModelInfo:
        return self._built.info

    @property
    def instances(self) -> int:
        """The number of copies of the model."""
        return len(self._loops)

    def run(self, jobs: Iterable[Job], on_finished: Callable[[], None] | None = None) -> RunFigures:
        """Run all requests, as many at a time as the queue has room for, and return their figures.

        KeyboardInterrupt ends the run, which is returned as interrupted. Steps run in a thread of their own, where no
        signal interrupts them.
        """
        stop = threading.Event()
        run = self._thread.submit(self._run, jobs, on_finished, stop)
        try:
            while not run.done():
                try:
                    wait([run])
                except KeyboardInterrupt:
                    stop.set()
            return run.result()
        finally:
            stop.set()
            wait([run])

    def close(self) -> None:
        """Free all device memory."""
        self._thread.shutdown()
        self._built.close()

    def __enter__(self) -> "OfflineEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, jobs: Iterable[Job], on_finished: Callable[[], None] | None, stop: threading.Event) -> RunFigures:
        compiled, preempted = self._compiled(), self._preempted()
        finished = input_tokens = output_tokens = 0
        in_flight: set[str] = set()
        start = self._built.clock.now()
        waiting = deque(self._engine.request(*job) for job in jobs)
        while (waiting or in_flight) and not stop.is_set():
            self._fill(waiting, in_flight)
            for piece in self._engine.step():
                if piece.error is not None:
                    raise piece.error
                output_tokens += sum(len(answer.token_ids) for answer in piece.outputs)
                if piece.finished:
                    in_flight.discard(piece.request_id)
                    finished, input_tokens = finished + 1, input_tokens + len(piece.prompt_token_ids)
                    if on_finished is not None:
                        on_finished()
        seconds = self._built.clock.now() - start
        self._settle_steps(in_flight)
        steps = tuple(tuple(record.take()) for record in self._records)
        return RunFigures(
            seconds, finished, input_tokens, output_tokens, steps,
            self._compiled() - compiled, self._preempted() - preempted, interrupted=stop.is_set(),
        )  # fmt: skip

    def _fill(self, waiting: deque[Request], in_flight: set[str]) -> None:
        while waiting and self._engine.has_room(waiting[0]):
            request = waiting.popleft()
            self._engine.accept(request)
            in_flight.add(request.id)

    def _settle_steps(self, unfinished: Iterable[str]) -> None:
        """Abort unfinished requests and complete the steps in flight."""
        for request_id in unfinished:
            self._engine.abort(request_id)
        while not self._engine.idle:
            self._engine.step()

    def _compiled(self) -> int:
        return sum(self._built.compilations.counts.values())

    def _preempted(self) -> int:
        return sum(loop.core.scheduler.num_preemptions for loop in self._built.instances)


def random_prompts(rng: np.random.Generator, vocab_size: int, count: int, length: int) -> list[TokensPrompt]:
    """Return prompts of fresh random tokens, so that no prefix cache helps."""
    return [TokensPrompt(tuple(row)) for row in rng.integers(0, vocab_size, (count, length)).tolist()]


def jobs(prompts: Sequence[Prompt], output_len: int, *, detokenize: bool = True) -> list[Job]:
    """Return greedy requests for answers of exactly `output_len` tokens."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=output_len, detokenize=detokenize)
    return [(prompt, params) for prompt in prompts]
