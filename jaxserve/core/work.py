"""A step's work and its result, which pass between the scheduler and the executor."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from jaxserve.core.request import Sequence


@dataclass(frozen=True)
class Chunk:
    """A range of a sequence's tokens, [start, start + length), that a step computes.

    The `last` chunk reaches the newest known token, so that the step samples the next one.
    """

    sequence: Sequence
    start: int
    length: int
    last: bool


@dataclass(frozen=True)
class Work:
    """Work of one step: sequences that decode one token each, and prefill chunks."""

    step: int
    decodes: tuple[Sequence, ...] = ()
    chunks: tuple[Chunk, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes, without padding."""
        return len(self.decodes) + sum(c.length for c in self.chunks)

    @cached_property
    def sampled_late(self) -> bool:
        """True if what a row may sample depends on the newest token, which may still be in flight."""
        return any(s.sampled_late for s in self.decodes) or any(c.last and c.sequence.sampled_late for c in self.chunks)


@dataclass(frozen=True)
class StepOutput:
    """Result of a step, on the host.

    The rows are `work.decodes`, then `work.chunks`. Rows of chunks that are not `last` have no meaning.
    Log-probabilities are None unless a row asked for them. `prompt_logprobs` has, by chunk index, (logprob [length],
    rank [length], top_ids [length, K], top_logprobs [length, K]) of the prompt tokens that follow the chunk's tokens.
    """

    tokens: np.ndarray  # int32[rows]; -1 if the row's logits are not finite
    logprob: np.ndarray | None = None  # float32[rows]
    rank: np.ndarray | None = None  # int32[rows]
    top_ids: np.ndarray | None = None  # int32[rows, K]
    top_logprobs: np.ndarray | None = None  # float32[rows, K]
    prompt_logprobs: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] | None = None
    embeddings: dict[int, np.ndarray] | None = None  # by chunk index: float32[hidden]


class PendingStep(Protocol):
    """A dispatched step whose result is still on the device."""

    def sample(self) -> None:
        """Dispatch the sampling of a step that waits for tokens of the step before (`Work.sampled_late`).

        Call it when these tokens are known, before the next step is dispatched. `fetch` does it otherwise.
        """
        ...

    def fetch(self) -> StepOutput:
        """Wait for the device and return the result. Raise `StageFailed` if it cannot compute that."""
        ...


class Executor(Protocol):
    """A backend that runs steps: `executor.BlockExecutor` on real devices, or the simulator's."""

    def execute(self, work: Work) -> PendingStep:
        """Dispatch a step without waiting for its result."""
        ...


def steps_in_flight(stages: int, *, overlap: bool = True) -> int:
    """Return how many steps of an instance are in flight at most, after a dispatch and before the oldest is fetched.

    While the host works on the tokens of a step, every stage has another one to compute.
    """
    return stages + 1 if overlap else 1
