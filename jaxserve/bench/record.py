"""What was seen of one request. All times are seconds after the start of the run."""

from dataclasses import dataclass, field


@dataclass
class RequestRecord:
    """Filled in while the request runs. Mutable: what is there when a run is interrupted counts."""

    index: int
    due_s: float  # its arrival, or when --max-concurrency let it go: latencies count from here
    arrival_s: float
    input_tokens: int
    sent_s: float | None = None
    chunk_times_s: list[float] = field(default_factory=list)  # of every chunk that carried tokens
    end_s: float | None = None
    output_tokens: int = 0
    text: str = ""
    status: int | None = None  # of HTTP
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the whole answer came."""
        return self.end_s is not None and self.error is None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.chunk_times_s[0] - self.due_s if self.chunk_times_s else None

    @property
    def e2el_s(self) -> float | None:
        """End-to-end latency: until the last chunk with tokens, as vLLM counts it."""
        return self.chunk_times_s[-1] - self.due_s if self.ok and self.chunk_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for answers of one token."""
        if not self.ok or self.output_tokens < 2 or not self.chunk_times_s:
            return None
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: gaps between chunks that carried tokens."""
        return [after - before for before, after in zip(self.chunk_times_s, self.chunk_times_s[1:], strict=False)]

    @property
    def lateness_s(self) -> float:
        """How long after it was due the client sent it: the client's own delay."""
        return 0.0 if self.sent_s is None else self.sent_s - self.due_s
