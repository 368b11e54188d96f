"""Results of a step on the device, and the transfer of the step's output to the host."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.core.work import Chunk, StepOutput, Work
from jaxserve.sampling.device_sampler import Sampled
from jaxserve.sampling.ops import Logprobs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForwardOutput:
    """The results of a step's blocks on the device."""

    x: Array  # [T, E], the output of the last decoder layer
    hidden: Array  # [R, E], normalised
    logits: Array  # f32 [R, V]


class DispatchedStep:
    """A step that the device may still be computing; a `core.work.PendingStep`."""

    def __init__(
        self,
        work: Work,
        sample: Callable[[], Sampled],
        scores: dict[int, list[Logprobs]],
        embeddings: Array | None,
        failure_of: Callable[[Exception], Exception],
    ):
        """`sample` dispatches the sampling. `scores`: of prompt tokens, by the index of a chunk its tiles.

        `failure_of` returns what `fetch` raises when an error comes from a device.
        """
        self.work, self.scores, self.embeddings = work, scores, embeddings
        self._failure_of = failure_of
        self._sample, self._sampled = sample, None if work.sampled_late else sample()

    def sample(self) -> None:
        """Dispatch the sampling, unless it is dispatched already."""
        if self._sampled is None:
            self._sampled = self._sample()

    @property
    def sampled(self) -> Sampled:
        """The tokens, which are sampled now if they are not yet."""
        self.sample()
        assert self._sampled is not None
        return self._sampled

    def fetch(self) -> StepOutput:
        """Wait for the device and return the step's output."""
        try:
            return self._fetch()
        except Exception as error:
            raise self._failure_of(error) from error

    def _fetch(self) -> StepOutput:
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


def wants_prompt_logprobs(chunk: Chunk) -> bool:
    """Return whether the prompt tokens that follow the tokens of this chunk need log-probabilities."""
    sequence = chunk.sequence
    return (
        sequence.params.prompt_logprobs is not None
        and sequence.index == 0
        and len(sequence.prompt_logprobs) < sequence.num_prompt
        and chunk.start < sequence.num_prompt - 1
    )


def unit_length(hidden: Array) -> Array:
    """Return hidden states [R, E] as embeddings f32[R, E] of length 1."""
    wide = hidden.astype(jnp.float32)
    return wide / jnp.maximum(jnp.linalg.norm(wide, axis=-1, keepdims=True), 1e-12)
