"""The record of one request, with all times in seconds after the start of the run."""

from dataclasses import dataclass, field


@dataclass
class RequestRecord:
    """A request's times, tokens and outcome, filled in while it runs.

    If the run is interrupted, what was filled in by then counts.
    """

    index: int
    due_s: float  # arrival, or a later time if --max-concurrency held it back; latencies count from here
    arrival_s: float
    input_tokens: int
    sent_s: float | None = None
    chunk_times_s: list[float] = field(default_factory=list)  # arrival of each chunk with tokens
    end_s: float | None = None
    output_tokens: int = 0
    text: str = ""
    status: int | None = None  # HTTP status
    error: str | None = None

    @property
    def ok(self) -> bool:
        """True if the whole answer arrived."""
        return self.end_s is not None and self.error is None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, or None without tokens."""
        return self.chunk_times_s[0] - self.due_s if self.chunk_times_s else None

    @property
    def e2el_s(self) -> float | None:
        """End-to-end latency until the last chunk with tokens, as in vLLM; None unless completed."""
        return self.chunk_times_s[-1] - self.due_s if self.ok and self.chunk_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for one token, or if the request did not complete."""
        if not self.ok or self.output_tokens < 2 or not self.chunk_times_s:
            return None
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: gaps between chunks that carried tokens."""
        return [after - before for before, after in zip(self.chunk_times_s, self.chunk_times_s[1:], strict=False)]

    @property
    def lateness_s(self) -> float:
        """The client's own delay: how long after it was due the request was sent."""
        return 0.0 if self.sent_s is None else self.sent_s - self.due_s
