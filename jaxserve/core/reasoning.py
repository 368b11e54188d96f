"""The reasoning with which an answer begins, as far as the engine has to know of it."""

from dataclasses import dataclass

from jaxserve.core.errors import RequestError


@dataclass(frozen=True)
class ReasoningSection:
    """The reasoning with which an answer begins. What the answer must be applies to the text after it.

    `start`, `end`: the tags around it. `begun`: the prompt has the start tag already, or the model leaves it out;
    otherwise the answer has a section if it begins with the tag. `max_tokens`: the number of tokens after which the end
    tag is written for the model, None without a limit. `other_starts`, `other_ends`: other spellings of the tags that
    the model uses.
    """

    start: str
    end: str
    begun: bool = False
    max_tokens: int | None = None
    other_starts: tuple[str, ...] = ()
    other_ends: tuple[str, ...] = ()

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

    @property
    def starts(self) -> tuple[str, ...]:
        """All spellings of the start tag."""
        return (self.start, *self.other_starts)

    @property
    def ends(self) -> tuple[str, ...]:
        """All spellings of the end tag."""
        return (self.end, *self.other_ends)
