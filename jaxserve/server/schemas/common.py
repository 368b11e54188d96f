"""What all request bodies share: strict types, unknown fields ignored, and the sampling parameters."""

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from jaxserve.core.errors import RequestError
from jaxserve.core.sampling import SamplingParams

logger = logging.getLogger(__name__)

PRIORITY_BOUND = 2**31
SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))

# Fields that change what is generated and that we do not serve: ignoring them would be a wrong answer.
NOT_SUPPORTED_YET = (
    "tools",
    "functions",
    "function_call",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "use_beam_search",
    "prompt_embeds",
    "audio",
    "web_search_options",
)


class Body(BaseModel):
    """A request body. Numbers must be numbers and strings strings; fields that nobody knows are ignored and logged."""

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given

    def check_extra(self) -> None:
        """Raises RequestError for known fields that are not supported; logs the names of unknown ones."""
        extra = self.model_extra or {}
        for name in NOT_SUPPORTED_YET:
            if extra.get(name):
                raise RequestError(f"{name} is not supported yet", field=name)
        if extra:
            logger.info(
                "ignored %d unknown fields: %s", len(extra), ", ".join(repr(name[:40]) for name in [*extra][:8])
            )


class StreamOptions(Body):
    """`include_usage`: a last event with the usage; `continuous_usage_stats`: the usage so far in every event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingBody(Body):
    """The sampling parameters that chat and completions share; None stands for the model's default."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-PRIORITY_BOUND, lt=PRIORITY_BOUND)] = 0
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    user: str | None = None
    response_format: dict[str, Any] | None = None

    def sampling_params(self, defaults: Mapping[str, Any], **override: Any) -> SamplingParams:
        """The parameters for the engine: `defaults` of the model, then the body's, then `override`."""
        asked = {name: getattr(self, name) for name in SAMPLING_FIELDS & self.__class__.model_fields.keys()}
        asked["logit_bias"] = _int_keys(self.logit_bias)
        given = {name: value for name, value in (asked | override).items() if value is not None}
        return SamplingParams(**{**defaults, "max_tokens": None, **given})

    @property
    def names(self) -> dict[str, str]:
        """What the client calls the engine's parameters where it sent another name."""
        return {}

    def check_stream(self) -> None:
        """Raises RequestError for combinations with `stream` and formats that are not served."""
        self.check_extra()
        kind = (self.response_format or {"type": "text"}).get("type")
        if kind != "text":
            raise RequestError(
                "response_format other than text is not supported yet", field="response_format", value=kind
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true", field="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs cannot be streamed", field="prompt_logprobs")

    @property
    def usage_at_end(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_always(self) -> bool:
        """Whether every event of a stream has the usage so far."""
        return self.usage_at_end and self.stream_options is not None and self.stream_options.continuous_usage_stats


def _int_keys(bias: dict[str, float] | None) -> dict[int, float] | None:
    """`logit_bias` with token ids as keys; JSON can only write them as strings."""
    if bias is None:
        return None
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise RequestError(
                f"logit_bias has the key {key[:40]!r}, it must be a token id", field="logit_bias", value=key
            )
    return {int(key): value for key, value in bias.items()}
