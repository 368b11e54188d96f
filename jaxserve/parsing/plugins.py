"""Formats of tool calls and reasoning from a user's Python file, which is executed."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from jaxserve.core.errors import ConfigError
from jaxserve.core.user_files import RAISED, place_of, said, user_module
from jaxserve.parsing.events import ParsedMessage
from jaxserve.parsing.formats.base import ToolFormat
from jaxserve.parsing.parser import AnswerFormat
from jaxserve.parsing.reasoning import ReasoningFormat
from jaxserve.parsing.registry import AUTO, NONE, REASONING_PARSERS, TOOL_PARSERS
from jaxserve.parsing.tools import Tool, ToolUse

T = TypeVar("T", ToolFormat, ReasoningFormat)
TOOL_PLUGIN, REASONING_PLUGIN = "--tool-parser-plugin", "--reasoning-parser-plugin"
TRIAL = Tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}}})


def tool_formats(source: str | Path) -> Mapping[str, ToolFormat]:
    """Return the formats of tool calls that "FILE.py" or "FILE.py:NAME" defines, by name.

    They are the subclasses of `ToolFormat` in the file. Raise `ConfigError`, naming the option, the file and the line,
    if the file cannot be executed, defines none, or one does not find the call that it writes itself.
    """
    path, name = _parts(source, TOOL_PLUGIN)
    module = _module(path, TOOL_PLUGIN)
    kinds = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, ToolFormat) and kind.__module__ == module.__name__
    ]
    forms = [_made(kind, path) for kind in kinds if name in ("", kind.__name__, getattr(kind, "name", None))]
    for form in forms:
        _check(form, path)
    return _by_name(forms, TOOL_PARSERS, source, "a subclass of ToolFormat", TOOL_PLUGIN)


def reasoning_formats(source: str | Path) -> Mapping[str, ReasoningFormat]:
    """Return the formats of reasoning that "FILE.py" or "FILE.py:NAME" defines, by name.

    They are the objects of the class `ReasoningFormat` in the file. Raise `ConfigError` as `tool_formats`.
    """
    path, name = _parts(source, REASONING_PLUGIN)
    found = vars(_module(path, REASONING_PLUGIN)).items()
    forms = [form for key, form in found if isinstance(form, ReasoningFormat) and name in ("", key, form.name)]
    return _by_name(forms, REASONING_PARSERS, source, "an object of ReasoningFormat", REASONING_PLUGIN)


def _parts(source: str | Path, option: str) -> tuple[Path, str]:
    """Return the file and the name of "FILE.py:NAME", "" if there is no name."""
    text = str(source)
    file, colon, name = text.rpartition(":")
    path, name = (Path(file), name) if colon and file.endswith(".py") else (Path(text), "")
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(f"{text} is no Python file: give FILE.py or FILE.py:NAME ({option})")
    return path, name


def _module(path: Path, option: str) -> ModuleType:
    try:
        return user_module(path)
    except RAISED as error:
        raise _raised(error, path, option) from error


def _made(kind: type[ToolFormat], path: Path) -> ToolFormat:
    try:
        return kind()
    except RAISED as error:
        raise _wrong(kind, path, said(error)) from error


def _check(form: ToolFormat, path: Path) -> None:
    """Raise `ConfigError` if a format has no name or no beginning, or does not find the calls that it writes itself."""
    kind = type(form)
    if not isinstance(getattr(form, "name", None), str) or not form.name:
        raise _wrong(kind, path, "it has no name")
    if not form.triggers and not form.first:
        raise _wrong(kind, path, "it has neither triggers nor first, so that its calls have no beginning")
    try:
        before, after = form.opening + form.before(TRIAL.name), form.after() + form.closing
        beginnings = (*form.triggers[:1], *filter(None, (form.first,)))
        if not before.startswith(beginnings):
            raise _wrong(
                kind, path, f"a call begins with {before!r}, and not with {' or '.join(map(repr, beginnings))}"
            )
        if kind.arguments is ToolFormat.arguments:
            _check_arguments(form, path, before, after)
        else:
            _calls(form, before + after)
    except ConfigError:
        raise
    except RAISED as error:
        raise _raised(error, path, TOOL_PLUGIN) from error


def _check_arguments(form: ToolFormat, path: Path, before: str, after: str) -> None:
    """Raise `ConfigError` if a format with arguments in JSON takes no object for a call, or anything else."""
    written = f"{before}{{}}{after}"
    if _calls(form, written) != [(TRIAL.name, "{}")]:
        reason = f"the call that it writes, {written!r}, is not found in an answer that consists of it"
        raise _wrong(type(form), path, reason)
    for other in ("", "1"):
        if any(not arguments.lstrip().startswith("{") for _, arguments in _calls(form, before + other + after)):
            reason = f'{before + other + after!r} has no object, but is a call: check source.comes("{{") in head'
            raise _wrong(type(form), path, reason)


def _calls(form: ToolFormat, answer: str) -> list[tuple[str, str]]:
    parser = AnswerFormat(None, form, ToolUse((TRIAL,))).parser()
    message = ParsedMessage.of([*parser.push(answer), *parser.finish()])
    return [(call.name, call.arguments) for call in message.calls]


def _by_name(forms: list[T], known: Mapping[str, T], source: str | Path, what: str, option: str) -> dict[str, T]:
    for form in forms:
        if form.name in known or form.name in (AUTO, NONE):
            raise ConfigError(f"{source}: {form.name!r} is the name of a built-in parser: choose another ({option})")
    if not forms:
        raise ConfigError(f"{source}: it defines no such format, which is {what} of jaxserve.parsing ({option})")
    return {form.name: form for form in forms}


def _wrong(kind: type, path: Path, reason: str) -> ConfigError:
    _, line = inspect.getsourcelines(kind)
    return ConfigError(f"{path}:{line}: {kind.__name__}: {reason} ({TOOL_PLUGIN})")


def _raised(error: BaseException, path: Path, option: str) -> ConfigError:
    return ConfigError(f"{place_of(error, path)}: {said(error)} ({option})")
