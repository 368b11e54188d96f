"""The reasoning with which an answer begins, as far as the engine has to know of it."""

from dataclasses import dataclass

from jaxserve.core.errors import RequestError
from jaxserve.core.keywords import explains_keywords
from jaxserve.core.plain_values import make_plain


@explains_keywords({})
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
        make_plain(self)
        if not all(isinstance(tag, str) and tag for tag in (*self.starts, *self.ends)):
            raise RequestError("a reasoning section needs a start and an end tag, which are texts", field="reasoning")
        if self.max_tokens is not None and (type(self.max_tokens) is not int or self.max_tokens < 0):
            raise RequestError(
                f"reasoning.max_tokens is {self.max_tokens!r}: it must be an integer of at least 0",
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
