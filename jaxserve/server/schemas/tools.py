"""Tools in request bodies: their definitions, which of them the model may call, and calls in messages."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, FailFast

from jaxserve.core.errors import RequestError, UnsupportedParameter
from jaxserve.parsing.keyword_values import TYPES
from jaxserve.parsing.tools import Tool, ToolUse
from jaxserve.server.schemas.body import Body, expecting
from jaxserve.server.schemas.left_out import HINT
from jaxserve.server.schemas.response_tools import custom_arguments

MAX_TOOLS = 1024
MAX_TOOL_NAME = 128  # characters of a tool's name
NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
MODES = ("none", "auto", "required")


def _mode(choice: Any) -> Any:
    """Return the mode of an object that has nothing else, as other APIs write it, and other values as they are."""
    match choice:
        case {"type": "none" | "auto" | "required" as mode} if len(choice) == 1:
            return mode
    return choice


ToolChoice = Annotated[str | dict[str, Any] | None, BeforeValidator(_mode), expecting("a string or an object")]
"""Which tools an answer calls: a mode, or an object that names tools."""


class ToolsBody(Body):
    """The fields of OpenAI's API about tools."""

    tools: Annotated[list[dict[str, Any]] | None, FailFast()] = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool = True

    def model_post_init(self, context: Any, /) -> None:
        """Drop tools that the client does not run itself, if the server ignores what it does not know."""
        super().model_post_init(context)
        self._leave_out_server_tools(("function", None))

    def tool_use(self) -> ToolUse | None:
        """Return the tools that the answer may call and how, None if it may call none.

        Raise RequestError if a definition is not valid or `tool_choice` does not fit the tools.
        """
        tools = tuple(self._tools())
        choice = self.tool_choice or "auto"
        if choice == "none" or (not tools and choice == "auto"):
            return None
        if not tools:
            raise RequestError("tool_choice needs tools", field="tool_choice", value=choice)
        chosen = _Choice.of(choice, {tool.name for tool in tools})
        callable_tools = tuple(tool for tool in tools if chosen.names is None or tool.name in chosen.names)
        limited = len(callable_tools) < len(tools)
        return ToolUse(
            callable_tools,
            required=chosen.required,
            limited=limited,
            parallel=self.parallel_tool_calls and not chosen.named,
            named=chosen.named,
        )

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the definitions for the chat template, None if the model shall not see any.

        Raise RequestError if a definition is not valid.
        """
        if not self._tools() or self.tool_choice == "none":
            return None
        return [
            {
                "type": "function",
                "function": {name: value for name, value in tool["function"].items() if name != "strict"},
            }
            for tool in self.tools or ()
        ]

    def _tools(self) -> Sequence[Tool]:
        given = self.tools or []
        if len(given) > MAX_TOOLS:
            raise RequestError(
                f"tools has {len(given)} entries, the limit is {MAX_TOOLS}",
                field="tools",
                value=len(given),
                limit=MAX_TOOLS,
            )
        tools = [_tool(tool, f"tools.{index}") for index, tool in enumerate(given)]
        seen: set[str] = set()
        for index, tool in enumerate(tools):
            if tool.name in seen:
                field = f"tools.{index}.function.name"
                raise RequestError(f"{field} is {tool.name!r}, as that of another tool", field=field, value=tool.name)
            seen.add(tool.name)
        return tools


class _Choice:
    """The demand of `tool_choice`.

    `names`: the only tools that may be called, None for all. `named`: it is one tool, to be called exactly once.
    """

    def __init__(self, required: bool, names: set[str] | None = None, *, named: bool = False):
        self.required, self.names, self.named = required, names, named

    @classmethod
    def of(cls, choice: str | Mapping[str, Any], known: set[str]) -> "_Choice":
        match choice:
            case "auto" | "required":
                return cls(choice == "required")
            case {"type": "function", "function": {"name": str() as name}}:
                return cls(True, {_known(name, known, "tool_choice.function.name")}, named=True)
            case {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list() as allowed},
            }:
                field = "tool_choice.allowed_tools.tools"
                names = {_known(_name_in(tool, field), known, field) for tool in allowed}
                if not names:
                    raise RequestError(f"{field} is empty", field=field)
                return cls(mode == "required", names)
        raise RequestError(
            f"tool_choice must be one of {', '.join(MODES)}, a function or allowed_tools",
            field="tool_choice",
            value=choice,
        )


def _name_in(tool: Any, field: str) -> str:
    match tool:
        case {"type": "function", "function": {"name": str() as name}}:
            return name
    raise RequestError(f"{field} must hold functions by name", field=field, value=tool)


def _known(name: str, known: set[str], field: str) -> str:
    if name not in known:
        raise RequestError(f"{field} is {name[:MAX_TOOL_NAME]!r}, which is not among tools", field=field, value=name)
    return name


def _tool(given: Mapping[str, Any], place: str) -> Tool:
    """Return the tool of a definition. Raise RequestError, naming the field, if it is not valid."""
    kind = given.get("type", "function")
    if kind != "function":
        raise UnsupportedParameter(
            f"{place}.type is {str(kind)[:40]!r}, which is not supported: it must be function",
            field=f"{place}.type",
            value=kind,
        )
    function = given.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{place}.function must be an object", field=f"{place}.function", value=function)
    place = f"{place}.function"
    name, parameters = function.get("name"), function.get("parameters")
    _check_name(name, f"{place}.name")
    if not isinstance(function.get("description", ""), str | None):
        raise RequestError(f"{place}.description must be a string", field=f"{place}.description")
    if not isinstance(parameters, Mapping | None):
        raise RequestError(f"{place}.parameters must be a JSON schema", field=f"{place}.parameters", value=parameters)
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise RequestError(f"{place}.strict must be true or false", field=f"{place}.strict", value=strict)
    kind = (parameters or {}).get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    # Types that do not exist are left out of account like everything that cannot be held, unless the tool is strict.
    exist = bool(kinds) and all(each in TYPES for each in kinds)
    if kind is not None and "object" not in kinds and (strict or exist):
        field = f"{place}.parameters"
        raise RequestError(f"{field} has the type {str(kind)[:40]!r}: it must be object", field=field, value=kind)
    return Tool(name, parameters, bool(strict), f"{place}.parameters")


def _check_name(name: Any, field: str) -> None:
    if isinstance(name, str) and len(name) > MAX_TOOL_NAME:
        message = f"{field} has {len(name)} characters, the limit is {MAX_TOOL_NAME}"
        raise RequestError(message, field=field, value=len(name), limit=MAX_TOOL_NAME)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        got = repr(name) if isinstance(name, str) else "missing" if name is None else f"of type {type(name).__name__}"
        message = f"{field} is {got}: it must have 1 to {MAX_TOOL_NAME} letters, digits and characters of _.:/-"
        raise RequestError(message, field=field, value=name)


def checked_calls(calls: Sequence[Any], place: str) -> list[dict[str, Any]]:
    """Return the calls of an assistant's message for the chat template.

    Raise RequestError, naming the field, if one is not valid.
    """
    return [_call(call, f"{place}.{index}") for index, call in enumerate(calls)]


def readable_call(given: dict[str, Any]) -> dict[str, Any]:
    """Return a call of another type, such as that of a custom tool, as one of a function, and others unchanged."""
    match given:
        case {"type": str() as kind, "custom": {"name": str() as name, "input": str() as text}} if kind != "function":
            function = {"name": name, "arguments": json.dumps(custom_arguments(text), ensure_ascii=False)}
            return {"id": given.get("id"), "type": "function", "function": function}
        case {"type": str(), "function": dict()}:
            return {**given, "type": "function"}
    return given


def _call(given: Any, place: str) -> dict[str, Any]:
    kind = given.get("type") or "function"
    if kind != "function":
        raise UnsupportedParameter(
            f"{place}.type is {str(kind)[:40]!r}, which is not supported: it must be function ({HINT})",
            field=f"{place}.type",
            value=kind,
        )
    match given:
        case {"function": {"name": str() as name, **function}}:
            arguments = function.get("arguments")
        case _:
            raise RequestError(
                f"{place} must be the call of a function: an object whose field function has a name and arguments",
                field=place,
                value=given,
            )
    if not isinstance(arguments, str | Mapping | None):
        field = f"{place}.function.arguments"
        raise RequestError(f"{field} must be JSON in a string", field=field, value=arguments)
    identity = {"id": given["id"]} if isinstance(given.get("id"), str) else {}
    return {**identity, "type": "function", "function": {"name": name, "arguments": arguments or {}}}
