"""Tools in the form of the Responses API, whose fields are not nested, in the form of chat completions."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.core.errors import RequestError, UnsupportedParameter

FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
KINDS = ("function", "custom")  # whose calls the client answers
# A custom tool takes any text, which the model writes as the only argument of a function.
CUSTOM_ARGUMENT = "input"


def chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools for chat completions. Raise RequestError for tools that the server would have to run itself."""
    return [_chat_tool(tool, f"tools.{index}") for index, tool in enumerate(tools)]


def custom_names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return the names of the custom tools."""
    return frozenset(str(tool.get("name")) for tool in tools if tool.get("type") == "custom")


def custom_arguments(text: str) -> dict[str, str]:
    """Return the arguments of the function that stands for a custom tool."""
    return {CUSTOM_ARGUMENT: text}


def chat_tool_choice(choice: str | Mapping[str, Any]) -> str | dict[str, Any]:
    """Return `tool_choice` for chat completions. Raise RequestError if it has an unknown form."""
    match choice:
        case str():
            return choice
        case {"type": "function" | "custom", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "tools": list() as allowed}:
            tools = [_chosen(tool, f"tool_choice.tools.{index}") for index, tool in enumerate(allowed)]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    kind = choice.get("type")
    raise UnsupportedParameter(
        "tool_choice must be none, auto, required, a function, a custom tool or allowed_tools, by name",
        field="tool_choice" if kind is None else "tool_choice.type",
        value=choice if kind is None else kind,
    )


def _chosen(tool: Any, place: str) -> dict[str, Any]:
    match tool:
        case {"type": "function" | "custom", "name": str() as name}:
            return {"type": "function", "function": {"name": name}}
    raise RequestError(f"{place} must be a function or a custom tool by name", field=place, value=tool)


def _chat_tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in KINDS:
        raise UnsupportedParameter(
            f"{place}.type is {str(kind)[:40]!r}: this server runs no tools itself, so that only tools of the types "
            f"{' and '.join(KINDS)} are supported",
            field=f"{place}.type",
            value=kind,
        )
    if tool.get("defer_loading"):
        field = f"{place}.defer_loading"
        raise UnsupportedParameter(f"{field} is not supported: all tools are shown to the model", field=field)
    if kind == "function":
        given = {name: tool[name] for name in FUNCTION_FIELDS if tool.get(name) is not None}
        return {"type": "function", "function": given}
    form = tool.get("format") or {"type": "text"}
    if not isinstance(form, Mapping) or form.get("type") != "text":
        field = f"{place}.format.type"
        value = form.get("type") if isinstance(form, Mapping) else form
        raise UnsupportedParameter(f"{field} is {value!r}: custom tools take text", field=field, value=value)
    parameters = {
        "type": "object",
        "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
        "required": [CUSTOM_ARGUMENT],
        "additionalProperties": False,
    }
    given = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    return {"type": "function", "function": {**given, "parameters": parameters}}
