"""The sampling parameters that chat and text completions have in common."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from jaxserve.core.allowed_tokens import AllowedTokens
from jaxserve.core.errors import RequestError
from jaxserve.core.sampling import SamplingParams
from jaxserve.server.schemas.body import Body, expecting
from jaxserve.server.schemas.harmless import HARMLESS_IN_STREAM_OPTIONS
from jaxserve.server.schemas.structured import StructuredBody

TOKEN_IDS = {"type": "array", "items": {"type": "integer"}}
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
MAX_SALT = 256  # characters of a cache_salt
# The value of max_tokens and truncate_prompt_tokens for as many tokens as fit.
ALL_THAT_FITS = -1
NO_BUDGET = -1  # the value of thinking_token_budget for reasoning of any length
Count = Annotated[int | None, BeforeValidator(lambda value: None if value is False else value)]
"""A number of log-probabilities, where false means that none are wanted."""
ThinkingBudget = Annotated[
    int | None, Field(ge=0), BeforeValidator(lambda value: None if value == NO_BUDGET else value)
]
"""A limit on the tokens of the reasoning, where -1 means that there is none."""
Priority = Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)]
Salt = Annotated[str | None, Field(max_length=MAX_SALT)]
SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))


class StreamOptions(Body):
    """Options of a stream.

    With `include_usage` the last event has the usage. With `continuous_usage_stats` every event has the usage so far.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False

    def check_inside(self, place: str) -> None:
        """Raise UnsupportedParameter for an option that no stream has."""
        self.check_extra({}, HARMLESS_IN_STREAM_OPTIONS, place)


class SamplingFields(Body):
    """The parameters of sampling that all endpoints for generation take. None means the model's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: Annotated[str | list[str] | None, expecting("a string or a list of strings")] = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: Annotated[Sequence[int] | None, PlainValidator(AllowedTokens), WithJsonSchema(TOKEN_IDS)] = None
    skip_special_tokens: bool | None = None


class SamplingBody(SamplingFields, StructuredBody):
    """The sampling parameters of chat and text completions. None means the model's default."""

    model: str | None = None
    n: int | None = None
    prompt_logprobs: Count = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    truncate_prompt_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority = 0
    cache_salt: Salt = None
    user: str | None = None

    def sampling_params(self, defaults: Mapping[str, Any], **override: Any) -> SamplingParams:
        """Return the engine's parameters: `defaults` of the model, overridden by the body, overridden by `override`."""
        asked = {name: getattr(self, name) for name in SAMPLING_FIELDS & self.__class__.model_fields.keys()}
        asked["logit_bias"] = _int_keys(self.logit_bias)
        if "structured" not in override:
            asked["structured"] = self.structured()
        given = {name: value for name, value in (asked | override).items() if value is not None}
        tokens = given.get("max_tokens")
        if tokens is not None and tokens < 1 and not (tokens == 0 and self.shows_prompt):
            raise RequestError(
                f"max_tokens is {tokens}: it must be at least 1, or -1 for as many as fit; 0 needs prompt_logprobs, or "
                "echo in /v1/completions",
                field="max_tokens",
                value=tokens,
                limit=1,
            )
        return SamplingParams(**{**defaults, "max_tokens": None, **given})

    @property
    def shows_prompt(self) -> bool:
        """True if the answer has the prompt's log-probabilities, so that it needs no generated token."""
        return self.prompt_logprobs is not None

    @property
    def client_names(self) -> dict[str, str]:
        """Names that the client uses for parameters of the engine, where they differ."""
        return {}

    def check_stream(self) -> None:
        """Raise RequestError if an unsupported field or a combination with `stream` is given."""
        self.check_extra()
        asks = self.stream_options is not None and (
            self.stream_options.include_usage or self.stream_options.continuous_usage_stats
        )
        if asks and not self.stream:
            raise RequestError("stream_options needs stream to be true", field="stream_options")

    def tokens_to_leave(self, asked: int | None) -> int:
        """Return the tokens for which a prompt must leave room. `asked`: max_tokens, None or -1 for as many as fit."""
        if asked == 0:
            return 0
        return max(asked or 1, self.min_tokens or 1, 1)

    @property
    def usage_at_end(self) -> bool:
        """True if the last event of a stream has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_always(self) -> bool:
        """True if every event of a stream has the usage so far."""
        return self.usage_at_end and self.stream_options is not None and self.stream_options.continuous_usage_stats


def prompt_tokens_to_keep(truncate: int | None, window: int, leave: int = 0) -> int | None:
    """Return the number of a prompt's last tokens to keep, None for all.

    It is at most `window`, the model's context: a longer prompt is refused. If `truncate` is -1, the prompt leaves room
    for `leave` tokens, unless it would then have none. Raise RequestError if `truncate` is neither -1 nor at least 1.
    """
    if truncate is None:
        return None
    if truncate >= 1:
        return min(truncate, window)
    if truncate == ALL_THAT_FITS:
        return window - leave if leave < window else window - 1
    raise RequestError(
        f"truncate_prompt_tokens is {truncate}: it must be at least 1, or -1 for as many as fit",
        field="truncate_prompt_tokens",
        value=truncate,
        limit=1,
    )


def answer_tokens(asked: int | None, room: int, *, clamp: bool) -> int | None:
    """Return the engine's max_tokens: None for as many as fit (-1 or None), and with `clamp` at most `room`."""
    if asked is None or asked == ALL_THAT_FITS:
        return None
    return min(asked, room) if clamp and room >= 1 else asked


def _int_keys(bias: dict[str, float] | None) -> dict[int, float] | None:
    """Return `logit_bias` with integer token ids as keys, which JSON can only write as strings."""
    if bias is None:
        return None
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise RequestError(
                f"logit_bias has the key {key[:40]!r}: keys must be token ids of the model",
                field="logit_bias",
                value=key,
            )
    return {int(key): value for key, value in bias.items()}
