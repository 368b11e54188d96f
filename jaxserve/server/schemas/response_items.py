"""The items of the Responses API - messages, reasoning, calls and their outputs - as messages of a conversation."""

import base64
import json
import uuid
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from jaxserve.core.errors import RequestError, UnsupportedParameter
from jaxserve.server.schemas.left_out import HINT, LeftOut
from jaxserve.server.schemas.response_tools import custom_arguments, model_name

Item = Mapping[str, Any]
ROLES = ("user", "assistant", "system", "developer")
INSTRUCTING = ("system", "developer")
REFERENCE = "item_reference"
# The types of items, with the beginnings of their ids.
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
MAX_ID = 128  # characters of an id that a client gives an item
# The field of the text in each type of content part.
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
SEALED = "jaxserve:"  # how `encrypted_content` of this server begins


def item_type(item: Item, place: str) -> str:
    """Return the type of an item. Raise RequestError, naming `place`, if it is missing or not supported."""
    kind = item.get("type")
    if kind is None and "role" in item:
        return "message"
    if kind is None and "id" in item:
        return REFERENCE
    if kind is None:
        raise RequestError(f"{place} has neither a type nor a role", field=f"{place}.type")
    if kind != REFERENCE and (not isinstance(kind, str) or kind not in PREFIXES):
        field = f"{place}.type"
        raise UnsupportedParameter(
            f"{field} is {str(kind)[:40]!r}: supported are {', '.join([*PREFIXES, REFERENCE])} ({HINT})",
            field=field,
            value=kind,
        )
    return str(kind)


def readable_item(item: dict[str, Any], left_out: LeftOut) -> dict[str, Any]:
    """Return an item with texts in the place of what the model cannot read.

    Calls of tools that this server does not know become calls of functions, and their results become results of these;
    other items become messages.
    """
    kind, call_id = item.get("type"), item.get("call_id")
    if not isinstance(kind, str | None):
        return item
    if kind is None or kind == REFERENCE or kind in PREFIXES:
        names = () if kind == "reasoning" else ("content", "output")
        return item | {name: left_out.parts(item[name], TEXTS, "input_text") for name in names if name in item}
    same = {name: item[name] for name in ("id", "call_id") if name in item}
    if kind.endswith("_call") and isinstance(call_id, str):
        name = kind.removesuffix("_call")
        return {**same, "type": "function_call", "name": name, "arguments": left_out.arguments(item)}
    if kind.endswith("_output") and isinstance(call_id, str):
        return {**same, "type": "function_call_output", "output": left_out.output(item)}
    role = "user" if kind.endswith(("_output", "_response")) else "assistant"
    return {**same, "type": "message", "role": role, "content": left_out.text(item)}


def new_item_id(kind: str) -> str:
    """Return a unique id, which nobody can guess, for an item of a type."""
    return f"{PREFIXES[kind]}_{uuid.uuid4().hex}"


def kept_item(item: Item, taken: Container[str]) -> dict[str, Any]:
    """Return a valid item as responses list it: with a type, a status and an id that is not `taken`."""
    kind, id = item_type(item, "item"), item.get("id")
    if not isinstance(id, str) or not 0 < len(id) <= MAX_ID or id in taken:
        id = new_item_id(kind)
    kept = {"status": "completed", **item, "type": kind, "id": id}
    if isinstance(content := item.get("content"), str):
        written = item.get("role") == "assistant"
        part = {"type": "output_text", "text": content, "annotations": []}
        kept["content"] = [part if written else {"type": "input_text", "text": content}]
    return kept


def messages_of(items: Iterable[tuple[str, Item]], instructions: str | None) -> list[dict[str, Any]]:
    """Return the messages of a conversation.

    `items`: items with their places, which errors name. Instructions, and the system and developer messages right after
    them, become one message, since many chat templates take a single one, at the beginning. What an assistant said in
    one turn - reasoning, text and calls - becomes one message as well.

    Raise RequestError if an item is not valid.
    """
    conversation = _Conversation()
    if instructions:
        conversation.instruct("system", instructions)
    for place, item in items:
        conversation.add(item, place)
    return conversation.messages


def seal(reasoning: str) -> str:
    """Return reasoning as `encrypted_content`, which clients send back unread. It is encoded, not secret."""
    return SEALED + base64.b64encode(reasoning.encode()).decode()


def reasoning_text(item: Item, place: str = "item") -> str:
    """Return the text of a reasoning item, "" if another server has encrypted it."""
    texts = _texts(item.get("content") or (), {"reasoning_text": "text", "text": "text"}, f"{place}.content")
    if not texts:
        texts = [_unseal(item.get("encrypted_content"))]
    if not any(texts):
        texts = _texts(item.get("summary") or (), {"summary_text": "text"}, f"{place}.summary")
    return "\n".join(texts)


def _unseal(sealed: Any) -> str:
    if not isinstance(sealed, str) or not sealed.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(SEALED), validate=True).decode()
    except ValueError:  # neither base64 nor, decoded, UTF-8
        return ""


class _Conversation:
    """Messages that grow by items."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add(self, item: Item, place: str) -> None:
        """Add an item. Raise RequestError, naming its place, if it is not valid."""
        match item_type(item, place):
            case "message":
                self._message(item, place)
            case "reasoning":
                self._reason(reasoning_text(item, place))
            case "function_call":
                arguments = _string(item, "arguments", place)
                self._call(item, arguments, place)
            case "custom_tool_call":
                text = _string(item, "input", place)
                self._call(item, json.dumps(custom_arguments(text), ensure_ascii=False), place)
            case "function_call_output" | "custom_tool_call_output":
                output = _text(item.get("output"), f"{place}.output")
                call_id = _string(item, "call_id", place)
                self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            case kind:
                raise AssertionError(kind)  # references have been replaced

    def instruct(self, role: str, text: str) -> None:
        """Add a system or developer message, to the one before it if that is the first."""
        if len(self.messages) == 1 and self.messages[0]["role"] in INSTRUCTING:
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": role, "content": text})

    def _message(self, item: Item, place: str) -> None:
        role, text = item.get("role"), _text(item.get("content"), f"{place}.content")
        if role not in ROLES:
            field = f"{place}.role"
            raise RequestError(f"{field} must be one of {', '.join(ROLES)}", field=field, value=role, limit=ROLES)
        if role in INSTRUCTING:
            self.instruct(str(role), text)
        elif role == "user":
            self.messages.append({"role": role, "content": text})
        else:
            turn = self._turn(continues=lambda last: not last["content"] or "tool_calls" in last)
            turn["content"] = "\n".join(filter(None, (turn["content"], text)))

    def _reason(self, text: str) -> None:
        if text:
            turn = self._turn(continues=lambda last: not last["content"] and "tool_calls" not in last)
            turn["reasoning_content"] = "\n".join(filter(None, (turn.get("reasoning_content"), text)))

    def _call(self, item: Item, arguments: str, place: str) -> None:
        namespace = None if item.get("namespace") is None else _string(item, "namespace", place)
        name = model_name(_string(item, "name", place), namespace)
        call = {
            "id": _string(item, "call_id", place),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        self._turn(continues=lambda last: True).setdefault("tool_calls", []).append(call)

    def _turn(self, continues: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the assistant's last message if an item continues it, else a new one."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or not continues(last):
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        return last


def _text(content: Any, place: str) -> str:
    """Return the text of a content: a string or a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{place} must be a string or a list of content parts", field=place, value=content)
    return "\n".join(_texts(content, TEXTS, place))


def _texts(parts: Any, names: Mapping[str, str], place: str) -> list[str]:
    """Return the texts of parts, whose types and the fields of their texts are `names`."""
    if not isinstance(parts, Sequence):
        raise RequestError(f"{place} must be a list of content parts", field=place, value=parts)
    return [_part_text(part, names, f"{place}.{index}") for index, part in enumerate(parts)]


def _part_text(part: Any, names: Mapping[str, str], place: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in names:
        raise UnsupportedParameter(
            f"{place}.type is {str(kind)[:40]!r}: this model reads text only ({', '.join(names)}; {HINT})",
            field=f"{place}.type",
            value=kind,
        )
    text = part.get(names[kind])
    if not isinstance(text, str):
        field = f"{place}.{names[kind]}"
        raise RequestError(f"{field} must be a string", field=field, value=text)
    return text


def _string(item: Item, name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        field = f"{place}.{name}"
        raise RequestError(f"{field} must be a string", field=field, value=value)
    return value
