"""Tools in messages: calls as chat templates expect them, and tools as text for templates that know nothing of them.

The format of the text is Hermes': definitions in the system message, calls as JSON in <tool_call> tags, and results in
<tool_response> tags.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

INSTRUCTIONS = """\
You can call functions. Their definitions, one JSON object per line:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments in these tags, once for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>"""


def with_argument_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message in which the arguments of calls are objects, as templates expect, and not JSON text.

    Arguments that are not the text of an object stay as they are: models may have written anything.
    """
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_argument_object(call) for call in calls]} if calls else message


def _with_argument_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": value}} if isinstance(value, dict) else call


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
    texts = [
        f'<tool_call>\n{{"name": {_json(c["name"])}, "arguments": {_json(c["arguments"])}}}\n</tool_call>'
        for c in calls
    ]
    given = [message["content"]] if message.get("content") else []
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join([*given, *texts])}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
