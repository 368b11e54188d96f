"""Terminal output shared by the commands: error messages, logs and Ctrl-C."""

import contextlib
import errno
import io
import logging
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import typer

from jaxserve.console.bars import console
from jaxserve.core.errors import ConfigError, JaxserveError

REPEAT_INTERRUPT_S = 0.05
INTERRUPTED = 130  # exit status after Ctrl-C, the convention of shells
# Errors of reading or writing a file that is open, which do not name it.
FILE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
WRONG_USE = 2  # exit status after a mistake on the command line, the convention of shells
UsageError: Any = typer.BadParameter.__base__  # typer only exports the derived class
# What a value must be, by pydantic's kind of error. Typer would print pydantic's own sentence, without the value.
LIMITS = {
    "int_parsing": "an integer",
    "float_parsing": "a number",
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:g}",
}


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn Ctrl-C, a wrong use, a `JaxserveError` or an error about a file into one line and an exit status."""
    try:
        yield
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
            typer.echo(error.message)
            raise typer.Exit(WRONG_USE) from error
        print_error(_usage_message(error) + (f"; see {error.ctx.command_path} --help" if error.ctx else ""))
        raise typer.Exit(WRONG_USE) from error
    except KeyboardInterrupt as interrupt:
        print_error("interrupted")
        raise typer.Exit(INTERRUPTED) from interrupt
    except JaxserveError as error:
        print_error(str(error))
        raise typer.Exit(1) from error
    except OSError as error:
        # An error of a pipe or a connection names no file, and its message alone would explain nothing.
        if error.filename is None and error.errno not in FILE_ERRORS:
            raise
        print_error(": ".join(filter(None, (error.filename, error.strerror))))
        raise typer.Exit(1) from error


def exit_with_status(results: Iterable[Mapping[str, Any]]) -> None:
    """Exit with status 130 if a result was interrupted, or with 1 if none of its requests was answered."""
    results = tuple(results)
    if any(result["interrupted"] for result in results):
        raise typer.Exit(INTERRUPTED)
    if any(result.get("failed") and not result["completed"] for result in results):
        raise typer.Exit(1)


def _usage_message(error: Any) -> str:
    """Return what was given on the command line and what is allowed."""
    flags = getattr(getattr(error, "param", None), "opts", None)
    if not error.message or not flags:  # a missing or an unknown name
        text: str = error.format_message().rstrip(".")
        return text[:1].lower() + text[1:]
    option = flags[0]
    if hasattr(error.__cause__, "errors"):  # newer versions of typer check values with pydantic
        wrong = error.__cause__.errors()[0]
        if wrong["type"] in LIMITS:
            return f"{option} is {wrong['input']!r}: it must be {LIMITS[wrong['type']].format(**wrong.get('ctx', {}))}"
    return f"{option}: {error.message.removeprefix('Value error, ').rstrip('.')}"


def print_error(message: str) -> None:
    """Print an error in one line on standard error."""
    console.print(f"jaxserve: {message}", style="bold red", markup=False, soft_wrap=True)


def print_notice(message: str) -> None:
    """Print what a user should know, but need not correct, in one line on standard error."""
    console.print(f"jaxserve: {message}", style="yellow", markup=False, soft_wrap=True)


def configure_logging(level: str) -> None:
    """Log this package's messages of a level and above as text."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("jaxserve").setLevel(level.upper())
    logging.getLogger("jaxserve.hub").setLevel(min(logging.INFO, logging.getLevelName(level.upper())))


def replace_unknown_characters() -> None:
    """Write "?" or U+FFFD for characters that a stream cannot encode, instead of failing in the middle of an answer."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def repeat_lost_interrupts() -> None:
    """Repeat a Ctrl-C that Python ignored because it came in a callback of the garbage collector or in a destructor."""
    report = sys.unraisablehook

    def repeat() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # also ends a waiting system call

    def hook(lost: Any) -> None:
        if lost.exc_type is KeyboardInterrupt:
            threading.Timer(REPEAT_INTERRUPT_S, repeat).start()  # after the callback has returned
        else:
            report(lost)

    sys.unraisablehook = hook


def read_stdin() -> str:
    """Return all of standard input. Raise `ConfigError` if it is closed."""
    if sys.stdin is None:
        raise ConfigError("standard input is closed")
    return sys.stdin.read()
