"""The request body of /v1/completions."""

from typing import Annotated, Any

from pydantic import WithJsonSchema

from jaxserve.core.errors import RequestError
from jaxserve.server.schemas.common import Count, SamplingBody
from jaxserve.server.schemas.prompts import PROMPT_SCHEMA

DEFAULT_MAX_TOKENS = 16  # OpenAI's default


class CompletionBody(SamplingBody):
    """A text completion as in OpenAI's API reference, with vLLM's additional sampling parameters."""

    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    max_tokens: int | None = None
    echo: bool = False
    suffix: str | None = None
    logprobs: Count = None
    best_of: int | None = None
    add_special_tokens: bool = True

    def check(self) -> None:
        """Raise RequestError if fields contradict each other or are not supported."""
        self.check_stream()
        if self.best_of is None:
            return
        if self.best_of < self.answers:
            raise RequestError(
                f"best_of is {self.best_of}: it must be at least n ({self.answers})",
                field="best_of",
                value=self.best_of,
                limit=self.answers,
            )
        if self.stream and self.best_of > self.answers:
            raise RequestError("best_of above n cannot be streamed", field="best_of", value=self.best_of)

    @property
    def client_names(self) -> dict[str, str]:
        """Names that the client uses for parameters of the engine, where they differ."""
        return {"n": "best_of"} if self.ranked else {}

    @property
    def answers(self) -> int:
        """Number of answers to return per prompt."""
        return 1 if self.n is None else self.n

    @property
    def candidates(self) -> int:
        """Number of answers to generate per prompt, of which the best are returned."""
        return self.answers if self.best_of is None else self.best_of

    @property
    def ranked(self) -> bool:
        """True if more answers are generated than returned."""
        return self.candidates > self.answers

    @property
    def shows_prompt(self) -> bool:
        """True if the answer has the prompt or its log-probabilities."""
        return self.echo or super().shows_prompt
