"""The workload of a run: requests and the times at which they arrive."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One request of a dataset: its prompt, as text or token ids, and how many tokens to ask for.

    A chat endpoint gets the prompt, which must be text, as one user message.
    """

    prompt: str | tuple[int, ...]
    input_tokens: int
    output_tokens: int  # sent as max_tokens


@dataclass(frozen=True)
class BenchRequest:
    """A sample and its arrival time in seconds after the start of the run."""

    arrival_s: float
    sample: Sample


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival, and a description of how they were made: dataset, seed and every scaling."""

    requests: tuple[BenchRequest, ...]
    description: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, samples: Iterable[Sample], arrivals_s: Iterable[float], description: Mapping[str, Any] | None = None
    ) -> "Workload":
        """Return a workload that pairs samples with arrivals, equal in number, in order of arrival."""
        pairs = zip(arrivals_s, samples, strict=True)
        requests = sorted((BenchRequest(float(time), sample) for time, sample in pairs), key=lambda r: r.arrival_s)
        return cls(tuple(requests), dict(description or {}))
