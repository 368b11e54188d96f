"""Errors that jaxserve raises on purpose. Messages say what was given, what is allowed, and which option decides.

The caller of the API can avoid a `RequestError` (HTTP 400 or 503); all other errors concern the operator.
"""

from typing import Any


class JaxserveError(Exception):
    """Base class of all errors that jaxserve raises on purpose."""


class RequestError(JaxserveError):
    """A request that cannot be served as it is.

    `field` names the parameter at fault, `value` is what was given and `limit` what is allowed (or None). `code` is
    OpenAI's name for this kind of error, or None.
    """

    status = 400
    code: str | None = None

    def __init__(self, message: str, *, field: str | None = None, value: Any = None, limit: Any = None):
        super().__init__(message)
        self.field, self.value, self.limit = field, value, limit


class ContextLengthExceeded(RequestError):
    """A prompt that, alone or with the tokens asked for, exceeds the model's context length."""

    code = "context_length_exceeded"


class PromptTooLong(ContextLengthExceeded):
    """A prompt that leaves no room in the model's context for a single generated token."""


class UnsupportedParameter(RequestError):
    """A parameter that would change the answer but is not supported."""

    code = "unsupported_parameter"


class UnknownKeyword(RequestError, TypeError):
    """A call with a keyword argument that the function, or the chat template, does not read."""


class NoTokenizer(RequestError, ValueError):
    """A request that gives text to, or wants text from, a model without a tokenizer."""

    def __init__(self) -> None:
        super().__init__(
            "the model has no tokenizer (its folder has no tokenizer.json or tokenizer.model, and the option tokenizer"
            " names none): give prompts as token ids",
            field="prompt",
        )


class GrammarTooComplex(RequestError):
    """A grammar that became too complex while an answer was generated, so that the answer cannot go on."""

    code = "grammar_too_complex"


class QueueFull(RequestError):
    """A request for which the queue (bounded in requests and tokens) has no room, to be sent again later.

    `retry_after` suggests after how many seconds.
    """

    status = 503
    code = "queue_full"

    def __init__(self, message: str, *, retry_after: float = 1.0, **kwargs: Any):
        super().__init__(message, **kwargs)
        self.retry_after = retry_after


class EngineStopped(JaxserveError):
    """A request that was not finished because the engine is stopping or has stopped."""

    status = 503


class EngineForked(EngineStopped):
    """A request in a process that was forked from the one that opened the engine, whose threads a fork lacks."""

    def __init__(self) -> None:
        super().__init__(
            "the engine runs in the process that opened it, not in a fork of that process: open the model in the"
            " process that uses it (with multiprocessing, under the start method 'spawn')"
        )


class EngineFailed(JaxserveError):
    """An error in the engine's loop, which ends every request in flight."""

    status = 500


class StageFailed(EngineFailed):
    """An error in a step of an instance, at one of its stages: what this stage's devices hold is lost."""

    def __init__(self, stage: int, error: BaseException):
        """`stage`: its index in the instance's plan. `error`: what was raised there."""
        super().__init__(f"stage {stage}: {type(error).__name__}: {error}")
        self.stage = stage


class NonFiniteOutput(JaxserveError):
    """A request for which the model computed NaN or infinity, so that it cannot go on."""

    status = 500

    def __init__(self, what: str):
        """`what` names the values that are not finite, e.g. "logits"."""
        super().__init__(
            f"the model computed {what} that are not finite (NaN or infinity). In float16 its values may exceed "
            "what that can hold: run the model with --dtype bfloat16 or float32. Otherwise its weights may be damaged"
        )


class ConfigError(JaxserveError):
    """A configuration that contradicts itself, the model or the machine."""


class CheckpointError(JaxserveError):
    """A checkpoint that cannot be loaded: its architecture is unsupported, or a file or tensor is missing or broken."""


class MemoryBudgetError(ConfigError):
    """A memory budget that is too small; the message says how much memory is needed."""


class PlanError(JaxserveError):
    """A plan that does not fit the machine or the model, or that cannot be reached from the plan in force."""

    status = 400
