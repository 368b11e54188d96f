"""The Typer application, group and command of which jaxserve's command line is made."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from jaxserve.cli.help import HELP_NAMES, help_text, take_topic
from jaxserve.cli.spelling import Speller, translate_bench
from jaxserve.cli.terminal import UsageError, exit_on_error, print_notice
from jaxserve.core.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


class App(typer.Typer):
    """A Typer application whose commands and groups have jaxserve's help."""

    def __init__(self, **settings: Any):
        """`settings`: those of Typer in which the application differs from others."""
        defaults: dict[str, Any] = {
            "cls": Group,
            "no_args_is_help": True,
            "rich_markup_mode": None,
            "pretty_exceptions_enable": False,
            "context_settings": {"help_option_names": list(HELP_NAMES)},
        }
        super().__init__(**defaults | settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[F], F]:
        """Return a decorator that adds a command."""
        decorator: Callable[[F], F] = super().command(name, **{"cls": Command} | settings)
        return decorator


class Command(TyperCommand):
    """A command with jaxserve's help, whose options may be in the spelling of other engines."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate the arguments, then parse them."""
        return super().parse_args(ctx, translated(ctx, args))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        formatter.write(help_text(self, ctx))


class Group(TyperGroup):
    """A group of commands with jaxserve's help; it may have options of its own, in any spelling.

    `others`: what to use instead of commands that other servers have.
    """

    others: ClassVar[Mapping[str, str]] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate what stands before the name of a command, then parse it."""
        return super().parse_args(ctx, translated(ctx, args))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first argument names. Raise a usage error if there is none."""
        if (advice := self.others.get(args[0])) and self.get_command(ctx, args[0]) is None:
            raise UsageError(f"no such command {args[0]!r}: use {advice}", ctx)
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        formatter.write(help_text(self, ctx))


class BenchCommand(Command):
    """A command that accepts --goodput ttft:500 tpot:50 and a bare --save-result, as `vllm bench` does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate the arguments, then parse them."""
        return super().parse_args(ctx, translate_bench(args))


class BenchGroup(Group):
    """A group whose own options accept what those of a `BenchCommand` do."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate what stands before the name of a command, then parse it."""
        return super().parse_args(ctx, translate_bench(args))


def translated(context: Any, args: list[str]) -> list[str]:
    """Return arguments in jaxserve's spelling, without the topic of the help, which the context keeps.

    Print a notice of those that have no effect. Raise a usage error for one that has no place here.
    """
    args = take_topic(context, args)
    if context.resilient_parsing:  # for the completion of a shell
        return args
    speller = Speller(context.command, context)
    try:
        found = speller.translate(args)
    except ConfigError as error:
        raise UsageError(str(error), context) from error
    for notice in speller.notices:
        print_notice(notice)
    return found


class Root(Group):
    """The whole command line, which ends with one line after Ctrl-C, and after an error that a user can correct."""

    others: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("run", "launch"), "jaxserve chat MODEL in the terminal, or jaxserve serve MODEL"),
        **dict.fromkeys(("list", "ls", "ps", "show"), "jaxserve models, or jaxserve plan for a running server"),
        **dict.fromkeys(("rm", "remove", "delete"), "jaxserve models remove NAME"),
        **dict.fromkeys(("start", "server", "api_server", "create"), "jaxserve serve MODEL"),
        **dict.fromkeys(("complete", "completion", "cli"), "jaxserve generate"),
        **dict.fromkeys(("download", "get"), "jaxserve pull NAME"),
        **dict.fromkeys(("batch", "run_batch"), "jaxserve run-batch"),
        "stop": "Ctrl-C, or send SIGTERM to the server",
        "help": "jaxserve --help, or jaxserve COMMAND --help",
        "version": "jaxserve --version",
    }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what stands before the name of a command."""
        with exit_on_error():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Parse the arguments of the chosen command, and run it."""
        with exit_on_error():
            return super().invoke(ctx)
