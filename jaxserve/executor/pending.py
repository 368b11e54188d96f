"""DispatchedStep: a step on its way through the device, and what is fetched of it."""

from dataclasses import dataclass

import numpy as np
from jax import Array

from jaxserve.core.work import StepOutput, Work
from jaxserve.sampling.device_sampler import Sampled
from jaxserve.sampling.ops import Logprobs


@dataclass(frozen=True)
class DispatchedStep:
    """A step on its way through the device; a `core.work.PendingStep`."""

    work: Work
    sampled: Sampled
    scores: dict[int, list[Logprobs]]
    embeddings: Array | None

    def fetch(self) -> StepOutput:
        """Waits for the device and returns the step's result."""
        rows = len(self.work.decodes) + len(self.work.chunks)
        logprobs: dict[str, np.ndarray] = {}
        if self.sampled.logprobs is not None:
            logprobs = {name: np.asarray(a)[:rows] for name, a in self.sampled.logprobs._asdict().items()}
        return StepOutput(
            np.asarray(self.sampled.tokens)[:rows],
            **logprobs,
            prompt_logprobs={index: self._join(index, tiles) for index, tiles in self.scores.items()} or None,
            embeddings=self._embeddings(),
        )

    def _join(self, index: int, tiles: list[Logprobs]) -> tuple[np.ndarray, ...]:
        chunk = self.work.chunks[index]
        wanted = min(chunk.length, chunk.sequence.num_prompt - 1 - chunk.start)
        return tuple(np.concatenate([np.asarray(a) for a in arrays])[:wanted] for arrays in zip(*tiles, strict=True))

    def _embeddings(self) -> dict[int, np.ndarray] | None:
        if self.embeddings is None:
            return None
        first, values = len(self.work.decodes), np.asarray(self.embeddings)
        return {i: values[first + i] for i, c in enumerate(self.work.chunks) if c.last and c.sequence.request.embed}
