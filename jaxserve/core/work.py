"""Values that pass between the scheduler and the executor: one step's work and its result."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxserve.core.request import Sequence


@dataclass(frozen=True)
class Chunk:
    """A piece of a sequence's tokens, [start, start + length), to be computed in this step.

    `last`: the chunk reaches the newest known token, so that the step samples the next one.
    """

    sequence: Sequence
    start: int
    length: int
    last: bool


@dataclass(frozen=True)
class Work:
    """One step: sequences that decode one token each, and prefill chunks."""

    step: int
    decodes: tuple[Sequence, ...] = ()
    chunks: tuple[Chunk, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(c.length for c in self.chunks)


@dataclass(frozen=True)
class StepOutput:
    """What a step sampled, on the host. Rows: `work.decodes`, then `work.chunks` (rows of chunks not `last` are void).

    tokens int32[rows], -1 for a row whose logits are not finite; logprob f32[rows], rank int32[rows], top_ids
    int32[rows, K] and top_logprobs f32[rows, K] are None unless a row asked for log-probabilities. prompt_logprobs: by
    chunk index, (logprob [length], rank [length], top_ids [length, K], top_logprobs [length, K]) of each *next* prompt
    token. embeddings: by chunk index, f32[hidden].
    """

    tokens: np.ndarray
    logprob: np.ndarray | None = None
    rank: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    prompt_logprobs: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] | None = None
    embeddings: dict[int, np.ndarray] | None = None


class PendingStep(Protocol):
    """A dispatched step whose result is still on the device."""

    def fetch(self) -> StepOutput:
        """Waits for the device and returns the result."""
        ...


class Executor(Protocol):
    """Carries out steps: `executor.BlockExecutor` on real devices, and the simulator's."""

    def execute(self, work: Work) -> PendingStep:
        """Dispatches a step without waiting for it."""
        ...

    def settle(self) -> None:
        """Waits for what is prepared in the background: steps that come next have it."""
        ...
