"""Tools: functions of the client that the model may call, and which of them it may or must call."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] | None = None  # a JSON schema of its arguments; None: it takes none
    strict: bool = False  # calls follow the schema in any case
    place: str = field(default="tools", compare=False)  # the name for errors


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request and how they may be used.

    `required`: the answer is at least one call. `limited`: the model knows of other tools, too, which it may not call.
    `parallel`: there may be several calls.
    """

    tools: tuple[Tool, ...]
    required: bool = False
    limited: bool = False
    parallel: bool = True

    @property
    def constrained(self) -> bool:
        """True if calls must follow a grammar."""
        return self.required or self.limited or any(tool.strict for tool in self.tools)
