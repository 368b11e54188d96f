"""The text of `--help`: an option on a line and its meaning below, so that nothing is cut in a narrow terminal.

The help of a command with many options shows those that people need first. `--help=all` shows all of them, and
`--help=WORD` those whose names, texts or groups have the word in them.
"""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from jaxserve.cli.spelling import flag_of, others_about, with_flags
from jaxserve.core.errors import ConfigError

HELP_NAMES = ("-h", "--help")
ALL = "all"
MAX_WIDTH = 100  # columns; longer lines are hard to read
MIN_WIDTH = 24
MAX_CHOICES = 40  # characters of the choices that stand beside an option's name; longer ones follow its text
INDENT = 6
VALUES = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}
TOPIC = "jaxserve.help"  # key of the context's `meta`


def take_topic(context: Any, args: list[str]) -> list[str]:
    """Return arguments with `--help=TOPIC` shortened to `--help`, and remember the topic.

    Of a group's arguments, only those before the name of a command are looked at.
    """
    for index, argument in enumerate(args):
        if argument == "--" or (hasattr(context.command, "commands") and not argument.startswith("-")):
            break
        name, equals, topic = argument.partition("=")
        if name in HELP_NAMES and equals:
            context.meta[TOPIC] = topic.strip()
            return [*args[:index], name, *args[index + 1 :]]
    return args


def help_text(command: Any, context: Any) -> str:
    """Return the help of a command or of a group of commands, on the topic that was asked for.

    Raise `ConfigError` if no option is about the topic.
    """
    topic, path = context.meta.get(TOPIC, ""), context.command_path
    if topic and topic != ALL:
        return _topic_help(command, topic, path)
    options = _options(command)
    first = [each for each in options if each.name not in getattr(command.callback, "shown_later", ())]
    parts = [*_beginning(command, context), *_commands(command)]
    parts += _sections(command, options if topic else first, _help_entry())
    if topic or len(first) == len(options):
        return "\n".join(parts)
    rest = (
        f"These are the {len(first)} options that are needed first, of {len(options)}. "
        f"{path} --help=all shows all of them, --help=WORD those about a word, as in --help=memory."
    )
    return "\n".join([*parts, "", *_wrap(rest)])


def _topic_help(command: Any, topic: str, path: str) -> str:
    """Return the options of a command about a topic, and for a group also where its commands have some.

    If it has none, return those of other engines with the topic in their names, and what to use instead.
    """
    others = others_about(topic, getattr(command.callback, "others", {}))
    options = _options(command)
    same = {other.same for other in others.values()}
    found = _about(topic, options) or [each for each in options if each.name in same]
    lines = [*_sections(command, found), *_places(command, topic, path)]
    if not lines and others:
        flags = {option.name: option.opts[0] for option in options}
        by_reason: dict[str, list[str]] = {}
        for name, other in others.items():
            by_reason.setdefault(other.reason, []).append(flag_of(name))
        lines = ["", _heading("Options of other engines")]
        for reason, names in by_reason.items():
            lines += _entry(", ".join(names), with_flags(reason, flags))
    if not lines:
        raise ConfigError(f"no option of {path} is about {topic!r}: {path} --help=all shows all")
    return "\n".join(lines).lstrip("\n")


def _commands(group: Any) -> list[str]:
    """Return the lines about the commands of a group; [] for a command."""
    commands = {name: command for name, command in getattr(group, "commands", {}).items() if not command.hidden}
    width = max(map(len, commands), default=0) + 4
    lines = []
    for name, command in commands.items():
        first, *rest = _wrap((command.help or "").partition("\n\n")[0], " " * width)
        lines += [f"  {_bold(name)}{first[len(name) + 2 :]}", *rest]
    return ["", _heading("Commands"), *lines] if lines else []


def _options(command: Any) -> list[Any]:
    return [each for each in command.params if each.param_type_name == "option" and not each.hidden]


# -- parts of a page


def _beginning(command: Any, context: Any) -> list[str]:
    """Return the purpose of a command, how it is called, and its arguments."""
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    pieces = ["[OPTIONS]", *(_argument(each) for each in arguments)]
    if hasattr(command, "commands"):
        pieces.append("COMMAND [ARGS]...")
    parts = [*_wrap(" ".join((command.help or "").split())), ""]
    usage = textwrap.wrap(f"Usage: {context.command_path} {' '.join(pieces)}", _width(), subsequent_indent=" " * INDENT)
    parts += [usage[0].replace("Usage", _bold("Usage"), 1), *usage[1:]]
    parts += [""] if arguments else []
    for each in arguments:
        parts += _entry(_argument(each), each.help or "")
    return parts


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name).upper()
    if parameter.nargs == -1 and not name.endswith("..."):
        name += "..."
    return name if parameter.required else f"[{name}]"


def _sections(command: Any, options: Iterable[Any], last: Iterable[str] = ()) -> Iterator[str]:
    """Yield the options under the headings of their groups, in the order in which the groups begin, and `last`."""
    groups: dict[str, list[Any]] = {}
    for option in options:
        groups.setdefault(_group(option), []).append(option)
    general = groups.pop("Options", [])
    parameters = signature(command.callback).parameters if command.callback else {}
    types = {name: each.annotation for name, each in parameters.items()}
    for group, entries in (*groups.items(), ("Options", general)):
        lines = [line for option in entries for line in _entry(*_described(option, types.get(option.name)))]
        lines += last if group == "Options" else ()
        yield from ("", _heading(group), *lines) if lines else ()


def _help_entry() -> list[str]:
    return _entry(", ".join(HELP_NAMES), "Show this help; --help=WORD: the options about a word.")


def _described(option: Any, hint: Any) -> tuple[str, str]:
    """Return an option's names with the kind of its value, and its text."""
    names = ", ".join(sorted((*option.opts, *option.secondary_opts), key=lambda name: name.startswith("--")))
    sentences = [option.help or ""]
    value, choices = _value(hint)
    if option.show_default and option.default not in (None, False, ()) and "Default:" not in sentences[0]:
        default = "yes" if option.default is True else option.default
        sentences.append(f"Default: {default}.")
    if choices and not value:
        value = "CHOICE"
        sentences.append(f"Choices: {', '.join(choices)}.")
    if option.envvar:
        sentences.append(f"Environment: {option.envvar}.")
    return f"{names} {value}".rstrip(), " ".join(sentences)


def _value(hint: Any) -> tuple[str, tuple[str, ...]]:
    """Return the kind of an option's value in a word ("" for switches and many choices), and its choices if any."""
    kinds = [hint]
    while kinds:
        kind = kinds.pop()
        if get_origin(kind) is Annotated:
            kinds.append(get_args(kind)[0])
        elif get_origin(kind) is Literal:
            choices = get_args(kind)
            shown = "|".join(choices)
            return (shown if len(shown) <= MAX_CHOICES else ""), choices
        elif kind in VALUES:
            return VALUES[kind], ()
        else:
            kinds += [part for part in get_args(kind) if part is not type(None)][::-1]
    return "", ()


def _entry(names: str, text: str) -> list[str]:
    """Return the lines about an option: its names, and what it does below them."""
    lines = textwrap.wrap(
        names, _width(), initial_indent="  ", subsequent_indent=" " * (INDENT - 2), break_on_hyphens=False
    )
    return [*map(_bold, lines), *_wrap(text, " " * INDENT)]


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, _width(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def _heading(text: str) -> str:
    return typer.style(f"{text}:", bold=True, underline=True) if _is_coloured() else f"{text}:"


def _bold(text: str) -> str:
    return typer.style(text, bold=True) if _is_coloured() else text


def _is_coloured() -> bool:
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return wanted and sys.stdout is not None and sys.stdout.isatty()


def _width() -> int:
    """Return the columns of the terminal, 80 without one."""
    return max(MIN_WIDTH, min(MAX_WIDTH, shutil.get_terminal_size((80, 24)).columns))


# -- topics


def _group(option: Any) -> str:
    return option.rich_help_panel or "Options"


def _about(topic: str, options: Iterable[Any]) -> list[Any]:
    """Return the options that have a word in their names, texts or group."""
    word = topic.lower().lstrip("-")
    spellings = {word, word.replace("_", "-"), word.replace("-", " ")}
    found = []
    for option in options:
        text = " ".join((*option.opts, *option.secondary_opts, option.help or "", _group(option))).lower()
        if any(spelling in text for spelling in spellings):
            found.append(option)
    return found


def _places(group: Any, topic: str, path: str) -> Iterator[str]:
    """Yield lines for each command of a group that has options on a topic; none for a command."""
    for name, command in getattr(group, "commands", {}).items():
        if found := _about(topic, _options(command)):
            yield from _entry(f"{path} {name}", ", ".join(option.opts[0] for option in found))
        yield from _places(command, topic, f"{path} {name}")
