"""Tools in the form of the Responses API, and in the form of chat completions, which knows functions alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.core.errors import RequestError, UnsupportedParameter

FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
KINDS = ("function", "custom", "namespace")
# A custom tool takes any text, which the model writes as the only argument of a function.
CUSTOM_ARGUMENT = "input"
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
    "required": [CUSTOM_ARGUMENT],
    "additionalProperties": False,
}
GRAMMAR = "{description}\n\nThe {argument} must follow this {syntax} grammar:\n{definition}"


@dataclass(frozen=True)
class ClientTool:
    """A tool that the client runs. `function`: what the model is told of it. `place`: the name for errors."""

    function: Mapping[str, Any]
    place: str
    namespace: str | None = None
    custom: bool = False

    @property
    def name(self) -> str:
        """The name in its namespace. It is checked with the other fields of the function."""
        return str(self.function.get("name"))

    @property
    def known_as(self) -> str:
        """The name by which the model knows the tool."""
        return model_name(self.name, self.namespace)

    def for_chat(self) -> dict[str, Any]:
        """Return the tool in the form of chat completions."""
        named = self.namespace is not None and isinstance(self.function.get("name"), str)
        return {"type": "function", "function": {**self.function, **({"name": self.known_as} if named else {})}}


def model_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a tool."""
    return name if not namespace else f"{namespace.removesuffix('__')}__{name}"


def client_tools(tools: Sequence[Mapping[str, Any]]) -> list[ClientTool]:
    """Return all tools, those in namespaces included.

    Raise RequestError, naming the field, for tools that the server would have to run itself.
    """
    return [tool for index, given in enumerate(tools) for tool in _tools(given, f"tools.{index}")]


def custom_arguments(text: str) -> dict[str, str]:
    """Return the arguments of the function that stands for a custom tool."""
    return {CUSTOM_ARGUMENT: text}


def chat_tool_choice(choice: str | Mapping[str, Any]) -> str | dict[str, Any]:
    """Return `tool_choice` for chat completions. Raise RequestError if it has an unknown form."""
    match choice:
        case str():
            return choice
        case {"type": "function" | "custom", "name": name}:
            return _by_name(name, choice)
        case {"type": "allowed_tools", "tools": list() as allowed}:
            tools = [_allowed(tool, f"tool_choice.tools.{index}") for index, tool in enumerate(allowed)]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    kind, field = choice.get("type"), "tool_choice.type"
    raise UnsupportedParameter(
        f"{field} is {str(kind)[:40]!r}: tool_choice must be none, auto, required, a function or custom tool by name, "
        "or allowed_tools",
        field=field,
        value=kind,
    )


def _by_name(name: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    namespace = tool.get("namespace")
    known_as = model_name(name, namespace) if isinstance(namespace, str) else name
    return {"type": "function", "function": {"name": known_as}}


def _allowed(tool: Any, place: str) -> dict[str, Any]:
    match tool:
        case {"type": "function" | "custom", "name": str() as name}:
            return _by_name(name, tool)
    raise RequestError(f"{place} must be a function or custom tool by name", field=place, value=tool)


def _tools(given: Mapping[str, Any], place: str, namespace: str | None = None) -> Iterator[ClientTool]:
    kind = given.get("type")
    if kind not in KINDS or (kind == "namespace" and namespace is not None):
        field = f"{place}.type"
        reason = f"this server runs no tools itself, and supports the types {', '.join(KINDS)}"
        raise UnsupportedParameter(f"{field} is {str(kind)[:40]!r}: {reason}", field=field, value=kind)
    if given.get("defer_loading"):
        field = f"{place}.defer_loading"
        raise UnsupportedParameter(f"{field} is not supported: the model is told of all tools", field=field)
    if kind == "namespace":
        name, tools = given.get("name"), given.get("tools")
        if not isinstance(name, str) or not name:
            raise RequestError(f"{place}.name must be a string", field=f"{place}.name", value=name)
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise RequestError(f"{place}.tools must be a list of tools", field=f"{place}.tools", value=tools)
        for index, tool in enumerate(tools):
            yield from _tools(tool, f"{place}.tools.{index}", name)
    elif kind == "custom":
        description = _custom_description(given, place)
        function = {"name": given.get("name"), "description": description, "parameters": CUSTOM_PARAMETERS}
        yield ClientTool(function, place, namespace, custom=True)
    else:
        function = {name: given[name] for name in FUNCTION_FIELDS if given.get(name) is not None}
        yield ClientTool(function, place, namespace)


def _custom_description(given: Mapping[str, Any], place: str) -> Any:
    """Return the description of a custom tool, with the grammar of its text if there is one."""
    description = given.get("description") or ""
    match given.get("format"):
        case None | {"type": "text"}:
            return description
        case {"type": "grammar", "syntax": "lark" | "regex" as syntax, "definition": str() as definition}:
            return GRAMMAR.format(
                description=description, argument=CUSTOM_ARGUMENT, syntax=syntax, definition=definition
            )
    field = f"{place}.format"
    raise RequestError(
        f"{field} must be text, or a grammar with a definition and the syntax lark or regex",
        field=field,
        value=given["format"],
    )
