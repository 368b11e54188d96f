"""The process's standard streams and texts: what must hold before a command runs, whatever starts the process."""

import contextlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.core.errors import ConfigError
from jaxserve.core.options import is_unicode

STANDARD_INPUT, STANDARD_OUTPUT, STANDARD_ERROR = 0, 1, 2
BROKEN_PIPE = 141  # exit status of a command whose reader has gone, the convention of shells: 128 + SIGPIPE


def open_closed_streams() -> None:
    """Open the null device in place of standard streams that are closed.

    Otherwise the next file or socket would get such a number, and libraries would write their messages into it. Input
    is opened for writing and output for reading, so that a command that needs them fails and loses nothing silently.
    """
    for number, mode in ((STANDARD_INPUT, os.O_WRONLY), (STANDARD_OUTPUT, os.O_RDONLY), (STANDARD_ERROR, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # gets the lowest number that is free, which is this one
    if sys.stdout is None:
        sys.stdout = sys.__stdout__ = open(STANDARD_OUTPUT, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115


class _Forgiving(io.FileIO):
    """A file that drops what cannot be written: its disk is full, or nobody reads it any more."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            return super().write(data) or len(data)
        return len(data)


class _Ending(io.FileIO):
    """A file that ends the command if it cannot be written, and then drops what is left."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            discard(self.fileno())
            raise SystemExit(BROKEN_PIPE) from None
        except OSError as error:
            discard(self.fileno())
            raise ConfigError(f"standard output: {error.strerror}") from error


def forgive_write_errors(name: str) -> None:
    """Let writing to `sys.stdout` or `sys.stderr`, named "stdout" or "stderr", never fail."""
    _replace(name, _Forgiving)


def end_on_write_errors() -> None:
    """Let a write to `sys.stdout` that fails end the command.

    If nobody reads the output any more, it raises SystemExit without a message, as other commands end by SIGPIPE.
    Otherwise it raises ConfigError.
    """
    _replace("stdout", _Ending)


def _replace(name: str, kind: type[io.FileIO]) -> None:
    """Replace a standard stream, unless it is closed or a program that imports this package has replaced it."""
    stream = getattr(sys, name)
    if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
        stream.flush()
        file = io.BufferedWriter(kind(stream.fileno(), "w", closefd=False))
        lines = stream.line_buffering or kind is _Forgiving
        new = io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=lines)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def discard(number: int) -> None:
    """Drop from now on what is written to a stream that cannot be written, which would fail once more at the end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


def read_texts_as_utf8(names: Sequence[str]) -> None:
    """Start the process again in Python's UTF-8 mode if its locale cannot read an argument or a variable of `names`.

    Raise ConfigError if one of them is no UTF-8 either.
    """
    unreadable = _unreadable(sys.argv, names, os.environ)
    if unreadable and not sys.flags.utf8_mode and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    for where, text in unreadable.items():
        raise ConfigError(f"{where} is {os.fsencode(text)!r}: it must be UTF-8")


def _unreadable(arguments: Sequence[str], names: Sequence[str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the texts that the locale could not read, by what they are."""
    texts = {f"argument {place}": text for place, text in enumerate(arguments) if place}
    texts |= {f"the variable {name}": variables[name] for name in names if name in variables}
    return {where: text for where, text in texts.items() if not is_unicode(text)}
