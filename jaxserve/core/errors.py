"""Every way in which jaxserve refuses or fails, with what was got, the limit and the knob.

`RequestError` and its subclasses are the caller's to mend (HTTP 4xx/503); the others are the operator's.
"""

from typing import Any


class JaxserveError(Exception):
    """Base of all errors that jaxserve raises on purpose."""


class RequestError(JaxserveError):
    """A request that cannot be served as it stands.

    `field` names the offending parameter, `value` what was got and `limit` the bound it broke (or None). `code` is
    OpenAI's name for the kind of error, where it has one.
    """

    status = 400
    code: str | None = None

    def __init__(self, message: str, *, field: str | None = None, value: Any = None, limit: Any = None):
        super().__init__(message)
        self.field, self.value, self.limit = field, value, limit


class ContextLengthExceeded(RequestError):
    """The prompt, or the prompt and the tokens asked for, do not fit the model's context."""

    code = "context_length_exceeded"


class PromptTooLong(ContextLengthExceeded):
    """The prompt alone does not fit, or leaves no room for a single generated token."""


class UnsupportedParameter(RequestError):
    """A parameter that would change the answer and that is not served."""

    code = "unsupported_parameter"


class NoTokenizer(RequestError, ValueError):
    """Text was given to, or wanted from, a model without a tokenizer."""

    def __init__(self) -> None:
        super().__init__(
            "the model has no tokenizer (there is no tokenizer.json or tokenizer.model in its folder, and the option"
            " tokenizer names none): give prompts as token ids",
            field="prompt",
        )


class QueueFull(RequestError):
    """The bounded queue (requests or tokens) has no room; try again after `retry_after` seconds."""

    status = 503
    code = "queue_full"

    def __init__(self, message: str, *, retry_after: float = 1.0, **kwargs: Any):
        super().__init__(message, **kwargs)
        self.retry_after = retry_after


class EngineStopped(JaxserveError):
    """The engine is draining or has stopped; the request was not finished."""

    status = 503


class EngineFailed(JaxserveError):
    """The engine loop raised; every request in flight ends with this error."""

    status = 500


class NonFiniteOutput(JaxserveError):
    """The model computed NaN or infinity for a request, which cannot go on."""

    status = 500

    def __init__(self, what: str):
        super().__init__(
            f"the model computed {what} that are not finite (NaN or infinity). Most often its values exceed what "
            "float16 can hold: run it with --dtype bfloat16 or float32. Otherwise its weights may be damaged"
        )


class ConfigError(JaxserveError):
    """A configuration that contradicts itself, the model or the machine."""


class CheckpointError(JaxserveError):
    """An unsupported architecture, or a missing, truncated or mis-shaped file or tensor (named in the message)."""


class MemoryBudgetError(ConfigError):
    """The memory budget is too small; the message says how many bytes are needed."""


class PlanError(JaxserveError):
    """A plan that does not fit the machine or the model, or that no transition leads to."""

    status = 400
