"""Instances whose tokens follow from the tokens before them, so that a change of the instances shows in an answer."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.core.clock import SystemClock
from jaxserve.core.request import Sequence as Answer
from jaxserve.core.work import StepOutput, Work
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.core import EngineCore
from jaxserve.engine.loop import StepLoop
from jaxserve.kvcache import PagePool, PageTable
from jaxserve.scheduler import Scheduler, SchedulerLimits
from jaxserve.telemetry import EngineMetrics, Snapshot

PAGE, TILE, VOCAB = 4, 8, 5000


def next_token(tokens: Sequence[int], seed: int) -> int:
    """Return the token that follows others."""
    return zlib.crc32(repr((list(tokens), seed)).encode()) % VOCAB


def answer_to(prompt: Sequence[int], length: int, seed: int = 0) -> tuple[int, ...]:
    """Return the first tokens of the answer to a prompt."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens, seed))
    return tuple(tokens[len(prompt) :])


@dataclass
class ComputedStep:
    """A step whose tokens are computed when they are fetched."""

    rows: Sequence[Answer]
    on_fetch: Callable[[], object]

    def sample(self) -> None:
        """Do nothing."""

    def fetch(self) -> StepOutput:
        """Return the tokens of the rows."""
        self.on_fetch()
        return StepOutput(np.array([next_token(row.tokens, row.seed) for row in self.rows], np.int32))


@dataclass
class TokenDevice:
    """An executor without a device. `on_fetch` runs before the tokens of each step are returned."""

    on_fetch: Callable[[], object] = lambda: None

    def execute(self, work: Work) -> ComputedStep:
        """Dispatch a step."""
        return ComputedStep((*work.decodes, *(chunk.sequence for chunk in work.chunks)), self.on_fetch)


def facts(max_model_len: int = 256, **limits: int) -> ModelInfo:
    """Return the facts about the model."""
    return ModelInfo("tokens", max_model_len, VOCAB, 8, 0, **limits)


def loop_named(
    name: str,
    metrics: EngineMetrics,
    info: ModelInfo,
    *,
    slots: int = 4,
    pages: int = 200,
    overlap: bool = True,
    make_core: type[EngineCore] = EngineCore,
) -> StepLoop:
    """Return the step loop of an instance."""
    width = info.max_model_len // PAGE
    scheduler = Scheduler(
        SchedulerLimits(slots, 4, TILE, PAGE), PagePool(pages, min_pages=width + 1), PageTable(slots, width)
    )
    core = make_core(scheduler, info, None, metrics, name=name, plan_fields=Snapshot(kv_pages_total=pages - 1))
    return StepLoop(core, TokenDevice(), SystemClock(), overlap=overlap)
