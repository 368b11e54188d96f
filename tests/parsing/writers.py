"""Tool calls as models write them, in every format."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.parsing.events import ParsedMessage
from jaxserve.parsing.formats.base import ToolFormat
from jaxserve.parsing.formats.mistral import NewerMistral
from jaxserve.parsing.parser import AnswerFormat
from jaxserve.parsing.registry import FORMATS
from jaxserve.parsing.tools import Tool, ToolUse

Calls = Sequence[tuple[str, dict[str, Any]]]

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city"],
    },
)
NOTE = Tool(
    "write_note",
    {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "meta": {"type": "object"},
            "draft": {"type": "boolean"},
            "title": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "weight": {"type": "number"},
        },
    },
)
NOW = Tool("now")
TOOLS = (WEATHER, NOTE, NOW)


def parsed(form: ToolFormat, *pieces: str, parallel: bool = True, tools: Sequence[Tool] = TOOLS) -> ParsedMessage:
    """Return the message that an answer in pieces is."""
    parser = AnswerFormat(None, form, ToolUse(tuple(tools), parallel=parallel)).parser()
    message = ParsedMessage()
    for piece in pieces:
        for event in parser.push(piece):
            message.add(event)
    for event in parser.finish():
        message.add(event)
    return message


def calls_of(message: ParsedMessage) -> list[tuple[str, Any]]:
    """Return the calls of a message with their arguments as values."""
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


def _object(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def _list(calls: Calls) -> str:
    return "[" + ", ".join(_object(*call) for call in calls) + "]"


def _hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{_object(*call)}\n</tool_call>" for call in calls)


def _internlm(calls: Calls) -> str:
    return "\n".join(f"<|action_start|><|plugin|>\n{_object(*call, 'parameters')}<|action_end|>" for call in calls)


def _deepseek_v3(calls: Calls) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(texts) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Calls) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(texts) + "<｜tool▁calls▁end｜>"


def _kimi(calls: Calls) -> str:
    texts = [
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(texts) + "<|tool_calls_section_end|>"


def _python(calls: Calls) -> list[str]:
    return [f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _qwen3_coder(calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        values = [f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in arguments.items()]
        texts.append(f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>")
    return "\n".join(texts)


def _glm(calls: Calls, gap: str = "\n") -> str:
    texts = []
    for name, arguments in calls:
        values = [
            f"<arg_key>{key}</arg_key>{gap}<arg_value>{_plain(value)}</arg_value>{gap}"
            for key, value in arguments.items()
        ]
        texts.append(f"<tool_call>{name}{gap}{''.join(values)}</tool_call>")
    return gap.join(texts)


def _minimax(calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        values = [f'<parameter name="{key}">{_plain(value)}</parameter>\n' for key, value in arguments.items()]
        texts.append(f'<invoke name="{name}">\n{"".join(values)}</invoke>\n')
    return f"<minimax:tool_call>\n{''.join(texts)}</minimax:tool_call>"


def _seed(calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        values = [f"<parameter={key}>{_plain(value)}</parameter>\n" for key, value in arguments.items()]
        texts.append(f"<seed:tool_call>\n<function={name}>\n{''.join(values)}</function>\n</seed:tool_call>")
    return "\n".join(texts)


FORMS: dict[str, ToolFormat] = {form.name: form for form in FORMATS} | {"mistral_11": NewerMistral()}
WRITERS: dict[str, Callable[[Calls], str]] = {
    "hermes": _hermes,
    "internlm": _internlm,
    "granite": lambda calls: "<|tool_call|>" + _list(calls),
    "jamba": lambda calls: f"<tool_calls>{_list(calls)}</tool_calls>",
    "phi4_mini_json": lambda calls: "functools" + _list(calls),
    "llama3_json": lambda calls: "; ".join(_object(*call, "parameters") for call in calls),
    "mistral": lambda calls: "[TOOL_CALLS] " + _list(calls),
    "mistral_11": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(values)}" for name, values in calls),
    "pythonic": lambda calls: f"[{', '.join(_python(calls))}]",
    "llama4_pythonic": lambda calls: f"<|python_start|>[{', '.join(_python(calls))}]<|python_end|>",
    "olmo3": lambda calls: "<function_calls>\n" + "\n".join(_python(calls)) + "\n</function_calls>",
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "kimi_k2": _kimi,
    "qwen3_coder": _qwen3_coder,
    "glm45": _glm,
    "glm47": lambda calls: _glm(calls, ""),
    "minimax_m2": _minimax,
    "seed_oss": _seed,
}
