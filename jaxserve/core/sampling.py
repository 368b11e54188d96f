"""Sampling parameters of a request, named as in the OpenAI API and vLLM, and their limits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.core.allowed_tokens import AllowedTokens
from jaxserve.core.errors import RequestError
from jaxserve.core.keywords import explains_attributes, explains_keywords
from jaxserve.core.plain_values import make_plain
from jaxserve.core.reasoning import ReasoningSection
from jaxserve.core.representation import short_repr
from jaxserve.core.structured import StructuredOutput
from jaxserve.core.vllm_attributes import SAMPLING_PARAMS
from jaxserve.core.vllm_names import SAMPLING

MAX_SPARSE_BIAS = 512  # token ids that logit_bias, bad_words and min_tokens of one sequence may bias together
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKENS = 64
MAX_BAD_WORDS = 64
MAX_STRING = 1024  # characters of a stop string or a bad word, as every token is compared with it
MAX_SEED = 2**63 - 1
RANDOM_SEED = -1  # sent by clients of vLLM and llama.cpp that want no seed


def _require(ok: bool, name: str, value: Any, limit: str) -> None:
    if not ok:
        raise RequestError(f"{name} is {value!r}: it must be {limit}", field=name, value=value, limit=limit)


def _number(name: str, value: Any, low: float, high: float, limit: str, *, low_open: bool = False) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    _require(ok and low <= value <= high and not (low_open and value == low), name, value, limit)


def _integer(name: str, value: Any, low: int, high: int | None, limit: str) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool)
    _require(ok and value >= low and (high is None or value <= high), name, value, limit)


def _count(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise RequestError(f"{name} has {count} entries, the limit is {limit}", field=name, value=count, limit=limit)


def _short(name: str, text: str) -> None:
    if len(text) > MAX_STRING:
        message = f"{name} has a string of {len(text)} characters, the limit is {MAX_STRING}"
        raise RequestError(message, field=name, value=len(text), limit=MAX_STRING)


@explains_attributes(SAMPLING_PARAMS)
@explains_keywords(SAMPLING)
@dataclass(frozen=True, repr=False)
class SamplingParams:
    """Sampling parameters of one request.

    `max_tokens=None` generates up to the model's length limit. `max_tokens=0` generates nothing: the prompt, which may
    then fill the model's context, is only computed, for its `prompt_logprobs` or the prefix cache. `top_k=0` (or -1)
    and `top_p=1` are off, `temperature=0` and `top_p=0` are greedy, and `seed=-1` is random, as None. `logprobs=k`
    returns the log-probabilities of the sampled token and of the k most likely tokens, computed from the raw logits.
    With `allowed_token_ids` the answer has no other tokens, so a token that ends it must be among them. `structured` is
    what the answer's text must be; only an answer that reaches `max_tokens` may break off earlier. `reasoning`
    describes the reasoning with which the answer begins, which may have a limit and to which `structured` does not
    apply.

    Scalars and arrays of NumPy, JAX and PyTorch are taken as Python's numbers and lists.

    Raise `RequestError` that names the field, the value and the limit if a value is not allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured: StructuredOutput | None = None
    reasoning: ReasoningSection | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        if self.seed == RANDOM_SEED:
            object.__setattr__(self, "seed", None)
        if self.allowed_token_ids is not None and not isinstance(self.allowed_token_ids, AllowedTokens):
            object.__setattr__(self, "allowed_token_ids", AllowedTokens(self.allowed_token_ids))
        self._check_numbers()
        self._check_flags()
        self._check_lists()

    def _check_numbers(self) -> None:
        _integer("n", self.n, 1, None, "an integer of at least 1")
        _number("temperature", self.temperature, 0, 100, "a number from 0 to 100")
        _number("top_p", self.top_p, 0, 1, "a number from 0 to 1")
        _integer("top_k", self.top_k, -1, None, "an integer of at least -1 (0 or -1: off)")
        _number("min_p", self.min_p, 0, 1, "a number from 0 to 1")
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED, "a 64-bit integer (-2**63 to 2**63 - 1)")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, None, "an integer of at least 0")
        least = "an integer of at least 0" if self.max_tokens is None else f"from 0 to max_tokens ({self.max_tokens})"
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens, least)
        _number("presence_penalty", self.presence_penalty, -2, 2, "a number from -2 to 2")
        _number("frequency_penalty", self.frequency_penalty, -2, 2, "a number from -2 to 2")
        _number("repetition_penalty", self.repetition_penalty, 0, 100, "a number above 0, at most 100", low_open=True)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, None, "an integer of at least 0")

    def _check_flags(self) -> None:
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        for name, kind in (("structured", StructuredOutput), ("reasoning", ReasoningSection)):
            value = getattr(self, name)
            _require(value is None or isinstance(value, kind), name, value, f"a {kind.__name__}")

    def _check_lists(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words"):
            value = getattr(self, name)
            alone = name == "stop" and isinstance(value, str)
            _require(value is None or alone or isinstance(value, (list, tuple)), name, value, "a list")
        for text in self.stop_strings:
            _require(isinstance(text, str) and text != "", "stop", text, "a non-empty string")
            _short("stop", text)
        _require(self.detokenize or not self.stop_strings, "stop", self.stop, "empty without detokenize")
        stop_ids = self.stop_token_ids or ()
        _count("stop_token_ids", len(stop_ids), MAX_STOP_TOKENS)
        for token in stop_ids:
            _integer("stop_token_ids", token, 0, None, "integers of at least 0")
        words = self.bad_words or ()
        _count("bad_words", len(words), MAX_BAD_WORDS)
        for text in words:
            _require(isinstance(text, str) and text.strip() != "", "bad_words", text, "a non-empty string")
            _short("bad_words", text)
        bias = {} if self.logit_bias is None else self.logit_bias
        _require(isinstance(bias, Mapping), "logit_bias", bias, "a mapping of token id to bias")
        _count("logit_bias", len(bias), MAX_LOGIT_BIAS)
        for token, value in bias.items():
            _integer("logit_bias", token, 0, None, "keyed by token id")
            _number("logit_bias", value, -100, 100, "a number from -100 to 100")

    def __repr__(self) -> str:
        return short_repr(self)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.temperature < 1e-5 or self.top_p == 0

    @property
    def constrained(self) -> bool:
        """True if a grammar or the limit of the reasoning decides which tokens may come next."""
        limited = self.reasoning is not None and self.reasoning.max_tokens is not None
        return limited or self.structured is not None

    @property
    def penalized(self) -> bool:
        """True if the tokens that have occurred so far change the logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1
