"""What the command line of `vllm bench` spells in a way of its own, respelled."""

import re
from typing import Any

from typer.core import TyperCommand

OBJECTIVE = re.compile(r"\w+:[\d.]+")
HERE = "."


class VllmCommand(TyperCommand):
    """A command that also takes --goodput ttft:500 tpot:50, --save-result without a file, and --random_input_len."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Respells, then parses as always."""
        return super().parse_args(ctx, respelled(args))


def respelled(args: list[str]) -> list[str]:
    """--goodput again before each further objective, "." after a bare --save-result, and dashes in names."""
    found: list[str] = []
    for argument in args:
        last = found[-1] if found else ""
        if last == "--save-result" and argument.startswith("-"):
            found.append(HERE)
        elif found[-2:-1] == ["--goodput"] and OBJECTIVE.fullmatch(argument):
            found.append("--goodput")
        found.append(_dashed(argument, last))
    return [*found, HERE] if found[-1:] == ["--save-result"] else found


def _dashed(argument: str, option: str) -> str:
    """--dataset_name=x as --dataset-name=x, and prefix_repetition after it as prefix-repetition."""
    if option in ("--dataset", "--dataset-name"):
        return argument.replace("_", "-")
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else argument
