"""The reasoning with which an answer begins, as far as the engine has to know of it."""

from dataclasses import dataclass

from jaxserve.core.errors import RequestError


@dataclass(frozen=True)
class ReasoningSection:
    """The reasoning with which an answer begins. What the answer must be applies to the text after it.

    `start`, `end`: the tags around it. `begun`: the prompt has the start tag already, or the model leaves it out;
    otherwise the answer has a section if it begins with the tag. `max_tokens`: the number of tokens after which the end
    tag is written for the model, None without a limit.
    """

    start: str
    end: str
    begun: bool = False
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.start or not self.end:
            raise RequestError("a reasoning section needs a start and an end tag", field="reasoning")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise RequestError(
                f"reasoning.max_tokens is {self.max_tokens}: it must be at least 0",
                field="reasoning.max_tokens",
                value=self.max_tokens,
                limit=0,
            )
