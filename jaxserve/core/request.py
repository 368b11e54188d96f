"""Requests, the sequences that are computed for them, and their outputs.

A request for n answers has n sequences, which share the pages of the prompt.
"""

from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Protocol

from jaxserve.core.errors import JaxserveError
from jaxserve.core.keywords import explains_attributes
from jaxserve.core.representation import short_repr
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.structured import Grammar, Matcher
from jaxserve.core.vllm_attributes import COMPLETION_OUTPUT, REQUEST_METRICS, REQUEST_OUTPUT


class FinishReason(StrEnum):
    """Reason why a sequence ended, as clients and metrics see it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SequenceStatus(Enum):
    """State of a sequence in the scheduler."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(frozen=True)
class TraceContext:
    """The part of an HTTP request that the traces of its requests need."""

    operation: str  # "chat", "text_completion" or "embeddings"
    headers: Mapping[str, str]  # traceparent and tracestate are read


@dataclass(frozen=True)
class Request:
    """An accepted request. Requests with different `salt` share no pages of the prefix cache."""

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival: float  # s
    prompt: str | None = None
    priority: int = 0  # smaller is served first
    salt: str = ""
    embed: bool = False  # return the pooled last hidden state instead of generating
    stream: bool = True  # return tokens as they are generated, not at the end of each answer
    grammar: Grammar | None = None  # compiled from `params.structured` and `params.reasoning`
    trace: TraceContext | None = None

    @property
    def generates(self) -> bool:
        """True if tokens follow the prompt. An embedding, or `max_tokens=0`, takes no more than the prompt."""
        return not self.embed and self.params.max_tokens != 0


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token under the model's raw distribution; rank 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = Mapping[int, Logprob]  # by token id; the sampled token, or the prompt's, comes first


class Detokenizer(Protocol):
    """An incremental detokenizer of one sequence."""

    def push(self, token_ids: abc.Sequence[int]) -> str:
        """Add tokens and return the text that they complete; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """Return the remaining text at the end of the sequence."""
        ...


class StopFinder(Protocol):
    """A search for the stop strings of one sequence while its text grows."""

    @property
    def begun(self) -> int:
        """Number of characters at the end of the text that may be the beginning of a stop string."""
        ...

    def push(self, new: str) -> tuple[int, str] | None:
        """Add text. Return (position, stop string) if one is complete, relative to the new text, else None."""
        ...


@dataclass(eq=False, slots=True)
class Sequence:
    """One answer that is being generated. Only the scheduler and the engine core change it.

    The keys and values of tokens [0, num_computed) are in pages, or will be after the steps already dispatched.
    `num_inflight` tokens were sampled by dispatched steps, and the host does not know them yet.
    """

    request: Request
    index: int  # index of the answer within the request
    seed: int
    max_total: int  # tokens, prompt included
    salt: str = ""  # salt of the prefix cache, from the plan's and the request's
    detokenizer: Detokenizer | None = None
    stops: StopFinder | None = None
    parent: "Sequence | None" = None  # answer of the same request whose prompt pages will be shared
    children: "list[Sequence]" = field(default_factory=list)  # answers that wait for this one's prompt pages
    stop_ids: frozenset[int] = frozenset()  # token ids that end the answer
    length_alone: bool = False  # the answer ends only by its length, not by a token or a text
    bad_words: tuple[tuple[int, ...], ...] = ()
    matcher: Matcher | None = None  # of the grammar that the answer follows, and of the tokens that it may have
    sampled_late: bool = False  # the host must know the newest token before the next one can be sampled
    status: SequenceStatus = SequenceStatus.WAITING
    tokens: list[int] = field(default_factory=list)  # prompt, then generated tokens
    num_prompt: int = 0
    num_computed: int = 0
    num_inflight: int = 0
    # Of these, the tokens that the host ignores: a grammar forces them, so that it knows them already, or they will be
    # sampled again.
    num_known_inflight: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache
    pages: list[int] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)
    num_registered: int = 0  # pages whose hashes are in the prefix cache
    private: bool = False  # never share the pages: they were computed under two plans
    slot: int = -1
    limit: int = 0  # tokens, prompt included, that the instance may compute: `max_total`, or less
    starts: int = 0  # number of times that the sequence was given a slot
    preemptions: int = 0
    text: str = ""
    held: int = 0  # characters at the end of `text` that may be the beginning of a stop string
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
    queued_at: float = 0.0  # time of arrival or of the latest preemption
    order: tuple[int, float, str, int] = (0, 0.0, "", 0)  # sort key of the queue: priority, then arrival

    def __post_init__(self) -> None:
        request = self.request
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.queued_at = request.arrival
        self.limit = self.max_total
        self.order = (request.priority, request.arrival, request.id, self.index)
        follows = self.matcher is not None and not self.matcher.static
        self.sampled_late = follows or any(len(word) > 1 for word in self.bad_words)

    @property
    def id(self) -> tuple[str, int]:
        return self.request.id, self.index

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_generated(self) -> int:
        """Number of tokens generated and known to the host."""
        return len(self.tokens) - self.num_prompt

    @property
    def total(self) -> int:
        """Number of tokens, known to the host or in flight."""
        return len(self.tokens) + self.num_inflight - self.num_known_inflight

    @property
    def outgrown(self) -> bool:
        """True if the next token is one more than the instance can hold, although it is not the last."""
        return len(self.tokens) >= self.limit < self.max_total

    @property
    def decoding(self) -> bool:
        """True if only the newest token remains to be computed."""
        return self.num_computed == self.total - 1 and self.total > self.num_prompt


# Not frozen: one is made for every token, and making a frozen one takes three times as long.
@explains_attributes(COMPLETION_OUTPUT)
@dataclass(slots=True, repr=False)
class CompletionOutput:
    """One answer of a request. In a stream, `text`, `token_ids` and `logprobs` hold only the new part."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def __repr__(self) -> str:
        return short_repr(self)


@explains_attributes(REQUEST_METRICS)
@dataclass(frozen=True)
class RequestMetrics:
    """Times of a request's events, in seconds of the engine's clock."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None


@explains_attributes(REQUEST_OUTPUT)
@dataclass(slots=True, repr=False)
class RequestOutput:
    """Output of a request. From `generate` it holds the whole answers, and in a stream only their new parts."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    embedding: Any = None  # float32[hidden] for an embedding request
    error: JaxserveError | None = None  # why the request ended early; the other fields then hold nothing new

    def __repr__(self) -> str:
        return short_repr(self)
