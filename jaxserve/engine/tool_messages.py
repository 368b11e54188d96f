"""Tools in messages: calls as chat templates expect them, and tools as text for templates that know nothing of them.

The format of the text is Hermes': definitions in the system message, calls as JSON in <tool_call> tags, and results in
<tool_response> tags.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

# Anthropic's key for the text of arguments that are no JSON object.
INVALID = "INVALID_JSON"
MAX_DEPTH = 100  # of arguments as an object: a template may need several calls of functions for each level

INSTRUCTIONS = """\
You can call functions. Their definitions, one JSON object per line:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments in these tags, once for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>"""


class Arguments(dict[str, Any]):
    """The arguments of a call as chat templates use them: an object, whose text is JSON.

    Some templates go through the members, some write the object by `tojson`, and others print it or join it to a string
    as if it were text.
    """

    @classmethod
    def of(cls, given: Any) -> "Arguments":
        """Return the object that arguments are: JSON text, its value, or None for no arguments.

        Whatever is no object becomes the only member of one, since models may have written anything.
        """
        if isinstance(given, Mapping):
            return cls(given)
        if given is None or given == "":
            return cls()
        text = given if isinstance(given, str) else _json(given)
        value = _value_of(text)
        return cls(value if isinstance(value, dict) else {INVALID: text})

    def __str__(self) -> str:
        return _json(self)

    def __add__(self, other: Any) -> str:
        return str(self) + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> str:
        return other + str(self) if isinstance(other, str) else NotImplemented


def with_argument_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message in which the arguments of calls are `Arguments`."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_argument_object(call) for call in calls]} if calls else message


def _with_argument_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": Arguments.of(function.get("arguments"))}}


def _value_of(text: str) -> Any:
    """Return the value of JSON text, None if it is none or is nested too deeply for templates to walk through."""
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    nested = text.count("{") + text.count("[") > MAX_DEPTH
    return None if nested and _is_deeper(value, MAX_DEPTH) else value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _is_deeper(value: Any, limit: int) -> bool:
    """Return whether objects and lists in a value are nested more than `limit` times."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            entry
            for each in level
            if isinstance(each, dict | list)
            for entry in (each.values() if isinstance(each, dict) else each)
        ]
    return bool(level)


def tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[Mapping[str, Any]]:
    """Return the messages with definitions, calls and results of tools in their text."""
    rewritten: list[Mapping[str, Any]] = []
    if tools:
        given = INSTRUCTIONS.format(tools="\n".join(_json(tool) for tool in tools))
        if messages and messages[0].get("role") == "system":
            given = f"{messages[0].get('content') or ''}\n\n{given}"
            messages = messages[1:]
        rewritten.append({"role": "system", "content": given})
    after_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        if is_result and after_result:  # many templates demand that user and assistant take turns
            last = rewritten.pop()
            rewritten.append({**last, "content": f"{last['content']}\n{_result(message)}"})
        elif is_result:
            rewritten.append({"role": "user", "content": _result(message)})
        elif message.get("tool_calls"):
            rewritten.append(_with_calls(message))
        else:
            rewritten.append(message)
        after_result = is_result
    return rewritten


def _result(message: Mapping[str, Any]) -> str:
    return f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message["tool_calls"]]
    texts = [f'<tool_call>\n{{"name": {_json(c["name"])}, "arguments": {c["arguments"]}}}\n</tool_call>' for c in calls]
    given = [message["content"]] if message.get("content") else []
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join([*given, *texts])}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
