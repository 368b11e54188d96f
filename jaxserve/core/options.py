"""Options: annotations on the fields of a configuration, from which its user interfaces are made.

A configuration is a frozen dataclass whose fields are `Annotated[type, Option(...)]`. The command line, YAML files, the
library's signatures, range checks and the tables in docs/options.md are all made from these annotations, so that an
option is defined once.
"""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from inspect import Parameter, Signature, cleandoc
from math import isfinite, isnan
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from jaxserve.core.errors import ConfigError

JsonObject = str | Mapping[str, Any]
"""The type of an option that is a mapping, which the command line gives as JSON."""


@dataclass(frozen=True)
class Option:
    """Help text, names and allowed values of an option.

    `help` says what the option does; the default is appended to it. `default` describes a default that depends on the
    model or the machine. `flags` are the spellings on the command line if they differ from the field's name, and `env`
    is the environment variable that sets it. A number must be at least `minimum`, more than `above` and at most
    `maximum`; an `endless` option may also be infinite. `in_terminal` options also belong to the commands
    `generate` and `chat`. `first` options are those that people need first, which `--help` shows without being asked.
    A `hub` option is a path, or a name on Hugging Face's hub.
    """

    group: str
    help: str
    default: str = ""
    flags: tuple[str, ...] = ()
    env: str | None = None
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    endless: bool = False
    in_terminal: bool = False
    first: bool = False
    hub: bool = False


@dataclass(frozen=True)
class OptionField:
    """A field of a configuration that is annotated with an `Option`."""

    name: str
    type: Any  # without None and without annotations
    optional: bool  # None is allowed
    default: Any
    option: Option

    @property
    def key(self) -> str:
        """Name of the option in YAML files and errors, with underscores; singular if the option is repeated."""
        first = self.option.flags[0].partition("/")[0] if self.option.flags else self.name
        return first.lstrip("-").replace("-", "_")

    @property
    def flag(self) -> str:
        """Name of the option on the command line, e.g. "--max-model-len"."""
        return "--" + self.key.replace("_", "-")

    @property
    def is_json(self) -> bool:
        """True if the option is a mapping."""
        return bool(self.type == JsonObject)

    @property
    def repeated(self) -> bool:
        """True if the option can be given several times."""
        return get_origin(self.type) in (tuple, list)

    def check(self, value: Any) -> None:
        """Raise `ConfigError` if a value is outside the option's range or not one of its choices."""
        if value is None and self.optional:
            return
        if self.type in (int, float):
            kinds, word = ((int,), "an integer") if self.type is int else ((int, float), "a number")
            if isinstance(value, bool) or not isinstance(value, kinds) or not self._allows(value):
                allowed = f"{word} {self.range}".rstrip()
                raise ConfigError(f"{self.key} is {value!r}: it must be {allowed} ({self.flag})")
        if self.type is bool and not isinstance(value, bool):
            raise ConfigError(f"{self.key} is {value!r}: it must be true or false ({self.flag})")
        if self.type in (str, str | Path) and not isinstance(value, (str, Path)):
            raise ConfigError(f"{self.key} is {value!r}: it must be a text ({self.flag})")
        if self.repeated and not isinstance(value, (tuple, list)):
            raise ConfigError(f"{self.name} is {value!r}: it must be a list, such as ({value!r},) ({self.flag})")
        for text in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(text, (str, Path)) and not is_unicode(str(text)):
                raise ConfigError(f"{self.key} is {str(text)!r}: it must be Unicode ({self.flag})")
        if get_origin(self.type) is Literal and value not in get_args(self.type):
            choices = ", ".join(map(str, get_args(self.type)))
            raise ConfigError(f"{self.key} is {value!r}: it must be one of {choices} ({self.flag})")

    def _allows(self, value: float) -> bool:
        option = self.option
        if option.minimum is option.above is option.maximum is None:
            # Options without a range may be infinite: their help says what that means.
            return not isnan(value)
        return (
            (isfinite(value) or option.endless)
            and (option.minimum is None or value >= option.minimum)
            and (option.above is None or value > option.above)
            and (option.maximum is None or value <= option.maximum)
        )

    @property
    def range(self) -> str:
        """Allowed numbers in words, e.g. "from 1 to 65535"; "" if every number is allowed."""
        option = self.option
        if option.minimum is not None and option.maximum is not None:
            return f"from {option.minimum:g} to {option.maximum:g}"
        words = []
        if option.minimum is not None:
            words.append(f"of at least {option.minimum:g}")
        if option.above is not None:
            words.append(f"above {option.above:g}")
        if option.maximum is not None:
            words.append(f"of at most {option.maximum:g}")
        return " and ".join(words)


def json_object(value: JsonObject, flag: str) -> dict[str, Any]:
    """Return the mapping of an option, which may be written as JSON.

    `flag`: the option's name on the command line. Raise `ConfigError`, naming it, if the value is no mapping of names.
    """
    given: Any = value
    if isinstance(value, str):
        try:
            given = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{flag} is not valid JSON: {error}") from None
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"{flag} is {str(value)[:80]!r}: it must be a JSON object, such as '{{\"name\": 1}}'")
    return dict(given)


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can write a text: it has no half of a pair, with which Python stands in for unread bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def options_of(kind: type) -> Iterator[OptionField]:
    """Yield the options of a configuration class in the order of its fields."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if get_origin(hint := hints[field.name]) is not Annotated:
            continue
        option = next((extra for extra in hint.__metadata__ if isinstance(extra, Option)), None)
        if option is not None:
            bare, optional = _without_none(get_args(hint)[0])
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            yield OptionField(field.name, bare, optional, default, option)


def check_ranges(config: Any) -> None:
    """Raise `ConfigError` if an option of a configuration has a value that is not allowed."""
    for field in options_of(type(config)):
        field.check(getattr(config, field.name))


def keyword_signature(kind: type, first: str, *more: Parameter) -> Signature:
    """Return the signature of a function with a configuration's fields as arguments, all but `first` by keyword only.

    `more`: further parameters, after the first. Notebooks and IDEs show it for functions that are declared with
    `**options`.
    """
    hints = get_type_hints(kind)
    parameters = [
        Parameter(
            field.name,
            Parameter.POSITIONAL_OR_KEYWORD if field.name == first else Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)
    ]
    begin, *rest = sorted(parameters, key=lambda parameter: parameter.name != first)
    return Signature([begin, *more, *rest])


def help_of(field: OptionField) -> str:
    """Return the text about an option in `--help` and the documentation: its purpose and its default."""
    default = field.option.default or _format_default(field.default)
    return f"{field.option.help} Default: {default}." if default else field.option.help


def with_options(docs: str | None, kind: type) -> str:
    """Return a docstring with a list of a configuration's options by group, which `help` and notebooks show."""
    groups: dict[str, list[str]] = {}
    for field in options_of(kind):
        text = f"{field.name}: {_in_python(help_of(field), kind)}"
        lines = textwrap.wrap(text, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        groups.setdefault(field.option.group, []).extend(lines)
    lists = {group: textwrap.indent("\n".join(texts), "  ") for group, texts in groups.items()}
    return "\n\n".join((cleandoc(docs or ""), *(f"{group}:\n{texts}" for group, texts in lists.items())))


def _in_python(text: str, kind: type) -> str:
    """Return the help of an option with the names that options have as keyword arguments."""
    for field in sorted(options_of(kind), key=lambda field: -len(field.flag)):
        text = re.sub(rf"(?<![\w-]){field.flag}(?![\w-])", field.name, text)
        if "-" in (bare := field.flag.removeprefix("--")):
            text = re.sub(rf"(?<![\w-]){bare}(?![\w-])", field.name, text)
    return text.replace(" (repeatable)", "")


def given_options(options: Any) -> Mapping[str, Any]:
    """Return the fields of a dataclass of options that are not None, by name."""
    return {field.name: value for field in fields(options) if (value := getattr(options, field.name)) is not None}


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Return a type without None, and whether None was part of it. `Literal` types stay whole."""
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    rest = tuple(part for part in get_args(hint) if part is not NoneType)
    return (rest[0] if len(rest) == 1 else Union[rest]), len(rest) < len(get_args(hint))  # noqa: UP007  built at run time


def _format_default(default: Any) -> str:
    if default is None or default == () or default == "":
        return ""
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:,}" if isinstance(default, int) and default >= 10_000 else f"{default}"
