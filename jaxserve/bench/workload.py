"""What a run sends: requests, and the times at which they are due."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One request of a dataset: what is asked, and for how much.

    `prompt` is text or token ids; a chat endpoint gets the text as one user message.
    """

    prompt: str | tuple[int, ...]
    input_tokens: int
    output_tokens: int  # asked for with max_tokens


@dataclass(frozen=True)
class BenchRequest:
    """A sample with its time of arrival in seconds after the start of the run."""

    arrival_s: float
    sample: Sample


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival, and how they were made: dataset, seed and every scaling, for the result."""

    requests: tuple[BenchRequest, ...]
    description: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, samples: Iterable[Sample], arrivals_s: Iterable[float], description: Mapping[str, Any] | None = None
    ) -> "Workload":
        """Pairs samples with arrivals, of equal number, and puts them in order of arrival."""
        pairs = zip(arrivals_s, samples, strict=True)
        requests = sorted((BenchRequest(float(time), sample) for time, sample in pairs), key=lambda r: r.arrival_s)
        return cls(tuple(requests), dict(description or {}))
