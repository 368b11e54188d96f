"""The life of a request: Request (what was asked), Sequence (one of its n answers, mutable), and the outputs.

A request with n > 1 has n sequences that share the prompt's pages.
"""

from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Protocol

from jaxserve.core.errors import JaxserveError
from jaxserve.core.sampling import SamplingParams


class FinishReason(StrEnum):
    """Why a sequence ended; the values are what clients and metrics see."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Status(Enum):
    """Where a sequence is."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(frozen=True)
class Request:
    """One accepted request. `priority`: smaller is served first; `salt` separates prefix caches of tenants; `stream`:
    new tokens are told as they come, and else with the end of an answer.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival: float
    prompt: str | None = None
    priority: int = 0
    salt: str = ""
    embed: bool = False  # return the pooled last hidden state instead of generating
    stream: bool = True


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability under the model's raw distribution; rank 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = Mapping[int, Logprob]  # token id -> Logprob, the sampled (or prompt) token first


class Detokenizer(Protocol):
    """Incremental detokenizer of one sequence."""

    def push(self, token_ids: abc.Sequence[int]) -> str:
        """The text that became certain with these tokens ('' while a character is incomplete). Mutates."""
        ...

    def flush(self) -> str:
        """What is left at the end. Mutates."""
        ...


class StopFinder(Protocol):
    """Looks for the stop strings of one sequence while its text grows."""

    @property
    def begun(self) -> int:
        """How many characters at the end of the text may still become a stop string."""
        ...

    def push(self, new: str) -> tuple[int, str] | None:
        """Adds text. Return where a stop string begins, relative to the new text, and which. Mutates."""
        ...


@dataclass(eq=False, slots=True)
class Sequence:
    """One answer in the making. Mutated only by the scheduler and the engine core.

    Positions: tokens [0, num_computed) have their keys and values in pages (or in a step already dispatched).
    `num_inflight` tokens were sampled by a dispatched step and are not yet known to the host.
    """

    request: Request
    index: int
    seed: int
    max_total: int  # tokens, prompt included
    salt: str = ""  # of the prefix cache: the plan's and the request's
    detokenizer: Detokenizer | None = None
    stops: StopFinder | None = None
    parent: "Sequence | None" = None  # n > 1: the sibling whose prompt pages will be shared
    children: "list[Sequence]" = field(default_factory=list)  # siblings that wait for this prompt
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence and stop_token_ids in force
    length_alone: bool = False  # ends it: no token and no text does
    bad_words: tuple[tuple[int, ...], ...] = ()
    status: Status = Status.WAITING
    tokens: list[int] = field(default_factory=list)  # prompt, then generated
    num_prompt: int = 0
    num_computed: int = 0
    num_inflight: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache
    pages: list[int] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)
    num_registered: int = 0  # pages whose hashes are in the prefix cache
    private: bool = False  # its pages were computed under two plans: they are shared with none
    slot: int = -1
    preemptions: int = 0
    text: str = ""
    held: int = 0  # characters of `text` that may still become a stop string
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    embedding: Any = None  # float32[hidden], once computed
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished_at: float | None = None
    queued_at: float = 0.0  # when it arrived, or was preempted
    order: tuple[int, float, str, int] = (0, 0.0, "", 0)  # who goes first: priority, then arrival

    def __post_init__(self) -> None:
        request = self.request
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.queued_at = request.arrival
        self.order = (request.priority, request.arrival, request.id, self.index)

    @property
    def id(self) -> tuple[str, int]:
        return self.request.id, self.index

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_generated(self) -> int:
        """Tokens generated and known to the host."""
        return len(self.tokens) - self.num_prompt

    @property
    def total(self) -> int:
        """Tokens known or in flight."""
        return len(self.tokens) + self.num_inflight

    @property
    def decoding(self) -> bool:
        """Whether only the newest token is left to compute."""
        return self.num_computed == self.total - 1 and self.total > self.num_prompt

    @property
    def synchronous(self) -> bool:
        """Whether the next token's logits depend on the value of the newest one on the host."""
        return bool(self.bad_words) and any(len(word) > 1 for word in self.bad_words)


@dataclass(slots=True)  # not frozen: one is made for every token, and frozen ones take three times as long to make
class CompletionOutput:
    """One of a request's n answers. In a stream `text`, `token_ids` and `logprobs` hold what is new."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request in seconds of the engine's clock."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """What a request has produced: all of it (`generate`), or what is new (`stream`)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    embedding: Any = None  # float32[hidden] for an embedding request
    error: JaxserveError | None = None  # what ended the request before its time; then there is nothing new
