"""Structured output: what a request may demand of its answer's text, and how the engine sees that it gets it."""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, get_origin

from jaxserve.core.errors import RequestError
from jaxserve.core.keywords import explains_keywords
from jaxserve.core.plain_values import plain
from jaxserve.core.reasoning import ReasoningSection
from jaxserve.core.representation import short_repr
from jaxserve.core.vllm_names import STRUCTURED

if TYPE_CHECKING:
    import numpy as np

MAX_GRAMMAR = 256 * 1024  # characters of a schema, an expression or a grammar
MAX_CHOICES = 10_000
MAX_SHOWN = 80  # characters of a wrong value in an error
# A regular expression of the white space between the parts of JSON. Without a limit, models that do not know what comes
# next write it for ever.
JSON_WHITESPACE = r"( |\n{1,2}[ \t]{0,20})"
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


class HasSchema(Protocol):
    """A type that knows its JSON schema, as Pydantic's `TypeAdapter` does."""

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON schema."""
        ...


@explains_keywords(STRUCTURED)
@dataclass(frozen=True, repr=False)
class StructuredOutput:
    """A demand on an answer's text, of which exactly one field is given.

    Raise `RequestError` that names the field if a value is not allowed. Whether a schema or grammar can be used shows
    when a request is made.
    """

    # A JSON schema, as a mapping or as text, or what has one: a class of Pydantic's models or a `TypeAdapter`.
    json: "str | Mapping[str, Any] | bool | type | HasSchema | None" = None
    json_object: bool = False  # any JSON object
    regex: str | None = None  # a regular expression that the whole text matches, without look-around
    choice: Sequence[str] | None = None  # one of these texts
    grammar: str | None = None  # a context-free grammar in the format of Lark, or in GBNF
    structural_tag: str | Mapping[str, Any] | None = None  # a tree of formats, as a mapping or as JSON text
    # False: keywords of JSON schemas that cannot be held are left out, with a line in the log. True: they are errors.
    strict: bool = field(default=False, kw_only=True)
    # The name for errors; "": that of the field.
    place: str = field(default="", kw_only=True, compare=False, repr=False)
    # What `grammar` has been made of. An error in it names its own place. Each of `parts` must be usable by itself.
    parts: "Sequence[StructuredOutput]" = field(default=(), kw_only=True, compare=False, repr=False)
    # Returns what is demanded instead if `parts` can be used but not all of the grammar.
    fallback: "Fallback | None" = field(default=None, kw_only=True, compare=False, repr=False)
    # What `grammar` leaves out, for the log.
    dropped: Sequence[str] = field(default=(), kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "json", _schema_of(self.json))
        object.__setattr__(self, "choice", plain(self.choice))
        object.__setattr__(self, "json_object", plain(self.json_object))
        given = [name for name in KINDS if getattr(self, name) is not (False if name == "json_object" else None)]
        if len(given) != 1:
            place = self.place or "structured"
            raise RequestError(
                f"{place} has {' and '.join(given) or 'nothing'}: give exactly one of {', '.join(KINDS)}", field=place
            )
        self._check_type()
        if len(self.text) > MAX_GRAMMAR:
            raise RequestError(
                f"{self.name} has {len(self.text)} characters, the limit is {MAX_GRAMMAR}",
                field=self.name,
                value=len(self.text),
                limit=MAX_GRAMMAR,
            )

    def _check_type(self) -> None:
        kind, value = self.kind, getattr(self, self.kind)
        if kind == "choice":
            texts = isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
            if not texts or not 0 < len(value) <= MAX_CHOICES:
                raise RequestError(
                    f"{self.name} must be a list of 1 to {MAX_CHOICES} strings, got {_shown(value)}",
                    field=self.name,
                    value=len(value) if texts else value,
                    limit=MAX_CHOICES,
                )
        elif kind in ("regex", "grammar") and (not isinstance(value, str) or not value):
            raise RequestError(
                f"{self.name} must be a non-empty string, got {_shown(value)}", field=self.name, value=value
            )
        elif kind == "json" and not isinstance(value, str | Mapping | bool):
            advice = ""
            if isinstance(value, type) or get_origin(value) is not None:
                advice = ": wrap it in pydantic.TypeAdapter"
            elif hasattr(value, "model_json_schema"):
                advice = ": give its class"
            raise RequestError(
                f"{self.name} must be a JSON schema, got {_shown(value)}{advice}", field=self.name, value=value
            )
        elif kind == "structural_tag" and not isinstance(value, str | Mapping):
            raise RequestError(f"{self.name} must be a structural tag", field=self.name, value=value)
        elif kind == "json_object" and value is not True:
            raise RequestError(f"{self.name} must be true or false", field=self.name, value=value)

    def __repr__(self) -> str:
        return short_repr(self)

    @property
    def kind(self) -> str:
        """The one of `KINDS` that is given."""
        return next(name for name in KINDS if getattr(self, name) is not (False if name == "json_object" else None))

    @property
    def name(self) -> str:
        """The name for errors."""
        return self.place or self.kind

    @cached_property
    def text(self) -> str:
        """The field's value as a text; equal texts of one kind mean the same."""
        value = getattr(self, self.kind)
        if isinstance(value, str):
            return value
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{self.name} cannot be written as JSON: {error}", field=self.name) from error


def _schema_of(value: Any) -> Any:
    """Return the JSON schema of a class of Pydantic's models or a `TypeAdapter`, and any other value as it is."""
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        return value.model_json_schema()
    if not isinstance(value, type | Mapping) and callable(getattr(value, "json_schema", None)):
        return value.json_schema()
    return value


Refusals = Callable[[Sequence[StructuredOutput]], Sequence[str]]
"""Returns for each of several demands why it cannot be used, "" if it can."""
Fallback = Callable[[Refusals], StructuredOutput]

NOTHING_LEFT = "no token is left"
"""The `error` of a matcher whose request has several demands that contradict each other."""


class Matcher(Protocol):
    """The state of one answer in its grammar, or of one whose tokens are otherwise restricted."""

    @property
    def static(self) -> bool:
        """True if the same tokens are allowed at every position."""
        ...

    @property
    def ended(self) -> bool:
        """True if the text is complete and nothing may follow."""
        ...

    @property
    def error(self) -> str:
        """Why the answer cannot go on, "" if it can."""
        ...

    def accept(self, token: int) -> None:
        """Take the next token, which `fill` has allowed."""
        ...

    def forced(self) -> Sequence[int]:
        """Return the tokens that must come next, as far as there is no choice."""
        ...

    def fill(self, mask: "np.ndarray") -> None:
        """Set the bits of the tokens that may come next in `mask` uint32 [ceil(V / 32)], and clear all others.

        None may if there is an `error`.
        """
        ...


class Grammar(Protocol):
    """A compiled grammar, which many answers may share."""

    def start(self) -> Matcher:
        """Return the state of an answer without tokens."""
        ...


class GrammarCompiler(Protocol):
    """A compiler of grammars for one tokenizer. Thread-safe."""

    def compile(self, structured: StructuredOutput) -> Grammar:
        """Return the grammar. Raise `RequestError` if it is invalid, unsupported or too large."""
        ...

    def submit(self, structured: StructuredOutput, sender: str = "") -> "Future[Grammar]":
        """Return the future of the grammar, which is done if the grammar has been compiled before.

        New grammars are compiled in turns between senders. `sender`: the client whose turn it is; "": one that sends
        nothing else. Cancelling the future ends the wait. Its error is that of `compile`. Raise `QueueFull` if too many
        grammars are waiting.
        """
        ...

    def after_reasoning(self, grammar: Grammar | None, section: ReasoningSection) -> Grammar:
        """Return the grammar of answers that begin with reasoning and go on as `grammar` says; None: with any text."""
        ...


def _shown(value: object) -> str:
    """Return a value of the wrong type for an error: a collection by its size, anything else cut to a few words."""
    if isinstance(value, list | tuple | set | frozenset | Mapping):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)[:MAX_SHOWN]
