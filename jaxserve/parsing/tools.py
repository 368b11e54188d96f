"""Tools: functions of the client that the model may call, and which of them it may or must call."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxserve.parsing.holdable import holdable

NO_PARAMETERS = {"properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] | None = None  # a JSON schema of its arguments; None: it takes none
    strict: bool = False  # calls follow the schema in any case
    place: str = field(default="tools", compare=False)  # the name for errors

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The JSON schema to which calls can be held: without `strict`, what no grammar can hold is left out."""
        return {**self._held[0], "type": "object"}

    @property
    def dropped(self) -> list[str]:
        """JSON pointers to what `schema` leaves out of `parameters`."""
        return self._held[1]

    @cached_property
    def _held(self) -> tuple[dict[str, Any], list[str]]:
        parameters = NO_PARAMETERS if self.parameters is None else self.parameters
        return holdable({**parameters, "type": "object"}, strict=self.strict)


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request and how they may be used.

    `required`: the answer is at least one call. `limited`: the model knows of other tools, too, which it may not call.
    `parallel`: there may be several calls. `named`: the client has named the tool, and the answer is one call of it.
    """

    tools: tuple[Tool, ...]
    required: bool = False
    limited: bool = False
    parallel: bool = True
    named: bool = False

    @property
    def constrained(self) -> bool:
        """True if calls must follow a grammar."""
        return self.required or self.limited or any(tool.strict for tool in self.tools)
