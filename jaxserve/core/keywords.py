"""Keyword arguments that a function does not have: those of other libraries are translated or explained."""

import difflib
import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn, TypeVar

from jaxserve.core.errors import UnknownKeyword
from jaxserve.core.plain_values import plain

log = logging.getLogger(__name__)

MAX_NAME = 80  # characters of a name that are shown; longer ones are compared with no other

VERY_SIMILAR = 0.8  # the similarity, from 0 to 1, at which a keyword argument of another library is suggested

EMPTY: tuple[Any, ...] = ("", [], {}, False)  # values that ask for nothing, whatever they are given for

T = TypeVar("T", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class OtherName:
    """A keyword argument of another library.

    `same`: the keyword argument here that means the same. Otherwise `reason` says what to do instead, and the argument
    is accepted only with a value in `neutral`, which changes nothing. `ignored`: any other value is accepted as well,
    and logged with the reason, because it concerns the other library alone and no answer. None is always accepted, as
    if the argument were not given. `each`: a list of such values, one for each prompt, is accepted as well. `value`:
    what a switch, which is true or false, gives to `same` if it is true; if not, `same` keeps its default.
    """

    same: str = ""
    value: Any = None
    reason: str = ""
    neutral: tuple[Any, ...] = EMPTY
    ignored: bool = False
    each: bool = False

    def accepts(self, value: Any) -> bool:
        """Return whether a value changes nothing."""
        value = plain(value)
        several = self.each and isinstance(value, list | tuple)
        return all(entry is None or is_one_of(entry, self.neutral) for entry in (value if several else (value,)))


def same(**names: str) -> dict[str, OtherName]:
    """Return the entries of keyword arguments that mean the same as others here, such as theirs="ours"."""
    return {name: OtherName(same=here) for name, here in names.items()}


def sets(option: str, value: Any, *names: str) -> dict[str, OtherName]:
    """Return the entries of switches that give an option here a certain value."""
    return dict.fromkeys(names, OtherName(same=option, value=value))


def use(reason: str, *names: str, neutral: tuple[Any, ...] = EMPTY, each: bool = False) -> dict[str, OtherName]:
    """Return the entries of keyword arguments that are refused with a reason unless their values are neutral."""
    return dict.fromkeys(names, OtherName(reason=reason, neutral=neutral, each=each))


def ignored(reason: str, *names: str, neutral: tuple[Any, ...] = EMPTY) -> dict[str, OtherName]:
    """Return the entries of keyword arguments that are ignored, and logged with the reason unless they are neutral."""
    return dict.fromkeys(names, OtherName(reason=reason, neutral=neutral, ignored=True))


def explains_keywords(others: Mapping[str, OtherName], what: str = "") -> Callable[[T], T]:
    """Return a decorator that translates or explains keyword arguments that a function or a dataclass does not have.

    `others`: the keyword arguments of other libraries. `what`: the function's name in errors, its own if "". A call
    raises `UnknownKeyword`, a `TypeError`, with the nearest name if a keyword argument is in neither. A function that
    takes any keyword argument gets those that are not in `others`, and must check them itself.
    """

    def decorate(target: T) -> T:
        function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
        parameters = inspect.signature(function).parameters
        known = frozenset(parameters) - {"self"}
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())

        @wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if not keywords.keys() <= known:
                accepted = keywords.keys() - others.keys() if takes_any else known
                keywords = translate(what or target.__qualname__, keywords, accepted, others)
            return function(*arguments, **keywords)

        if not isinstance(target, type):
            return call  # type: ignore[return-value]  # of the same signature
        target.__init__ = call  # type: ignore[misc]
        return target

    return decorate


def translate(
    what: str,
    given: Mapping[str, Any],
    known: Collection[str],
    others: Mapping[str, OtherName],
    *,
    hints: Collection[str] = (),
) -> dict[str, Any]:
    """Return keyword arguments by the names that `what` has. Raise `UnknownKeyword` for one that it cannot take.

    `hints`: further names with which an unknown one is compared.
    """
    found = {name: value for name, value in given.items() if name in known}
    for name in given.keys() - known:
        value, other = given[name], others.get(name)
        if other is None:
            shown = repr(str(name)[:MAX_NAME])
            raise UnknownKeyword(
                f"{what} does not take {shown}{nearest(str(name), {*known, *hints}, others)}", field=name
            )
        if value is None:
            continue
        if other.same:
            if other.value is not None:
                if not value:
                    continue
                value = other.value
            if other.same in found:
                raise UnknownKeyword(f"{what}: {name} and {other.same} are the same: give one of them", field=name)
            found[other.same] = value
        elif not other.accepts(value):
            if not other.ignored:
                raise UnknownKeyword(f"{what} does not take {name!r}: {other.reason}", field=name)
            log.warning("%s has no effect: %s", name, other.reason)
    return found


def is_one_of(value: Any, neutral: Collection[Any]) -> bool:
    """Return whether a value is neutral. True is not 1 and False not 0, although Python compares them equal."""
    return any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in neutral)


def nearest(name: str, known: Collection[str], others: Mapping[str, OtherName] | None = None) -> str:
    """Return the question whether the most similar name was meant, for the end of an error; "" if none is similar."""
    others = others or {}
    if len(name) > MAX_NAME:
        return ""
    own = difflib.get_close_matches(name, sorted({*known} - {name}), n=1)  # a hint may have the name itself
    similar = [*own, *difflib.get_close_matches(name, sorted(others), n=1, cutoff=VERY_SIMILAR)]
    similar.sort(key=lambda each: difflib.SequenceMatcher(None, each, name).ratio(), reverse=True)
    if not similar:
        return ""
    other = others.get(similar[0])
    if other is None:
        return f": did you mean {similar[0]!r}?"
    if other.same:
        return f": did you mean {similar[0]!r}, which is {other.same!r} here?"
    return f": did you mean {similar[0]!r}? {other.reason}"


def explains_attributes(others: Mapping[str, str]) -> Callable[[C], C]:
    """Return a decorator of classes: for an attribute that a library in `others` has, errors say what to use instead.

    It is no method `__getattr__`, of which type checkers would conclude that every attribute exists.
    """

    def decorate(owner: C) -> C:
        def explain(self: object, name: str) -> NoReturn:
            raise missing_attribute(self, name, others)

        owner.__getattr__ = explain  # type: ignore[attr-defined]
        return owner

    return decorate


def missing_attribute(owner: object, name: str, others: Mapping[str, str]) -> AttributeError:
    """Return the error for an attribute that an object does not have. `others`: advice by name."""
    advice = f": {others[name]}" if name in others else ""
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{advice}", name=name, obj=owner)
