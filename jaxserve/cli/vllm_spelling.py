"""Translation of spellings that only the command line of `vllm bench` has."""

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

OBJECTIVE = re.compile(r"\w+:[\d.]+")
CURRENT_FOLDER = "."


class VllmCommand(TyperCommand):
    """A command that also accepts --goodput ttft:500 tpot:50, a bare --save-result, and --random_input_len."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate vLLM's spellings, then parse."""
        return super().parse_args(ctx, translate(args))


class VllmGroup(TyperGroup):
    """A group of commands whose own options accept the spellings of a `VllmCommand`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate vLLM's spellings, then parse what stands before the name of a command."""
        return super().parse_args(ctx, translate(args))


def translate(args: list[str]) -> list[str]:
    """Repeat --goodput before each further objective, add "." to a bare --save-result, and use dashes in names."""
    found: list[str] = []
    for argument in args:
        last = found[-1] if found else ""
        if last == "--save-result" and argument.startswith("-"):
            found.append(CURRENT_FOLDER)
        elif found[-2:-1] == ["--goodput"] and OBJECTIVE.fullmatch(argument):
            found.append("--goodput")
        found.append(_with_dashes(argument, last))
    return [*found, CURRENT_FOLDER] if found[-1:] == ["--save-result"] else found


def _with_dashes(argument: str, option: str) -> str:
    """Write --dataset_name as --dataset-name, and after it prefix_repetition as prefix-repetition."""
    if option in ("--dataset", "--dataset-name"):
        return argument.replace("_", "-")
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else argument
