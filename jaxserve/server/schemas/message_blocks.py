"""Turns of Anthropic's Messages API, which consist of content blocks, as messages of a chat completion."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal

from jaxserve.core.errors import RequestError, UnsupportedParameter
from jaxserve.server.http.json_text import to_json
from jaxserve.server.schemas.body import Body, expecting
from jaxserve.server.schemas.harmless import HARMLESS_IN_MESSAGES
from jaxserve.server.schemas.left_out import HINT, LeftOut
from jaxserve.server.schemas.unsupported import UNSUPPORTED_IN_MESSAGES

Content = Annotated[str | list[dict[str, Any]], expecting("a string or a list of content blocks")]
Block = tuple[str, Mapping[str, Any]]  # the block's name for errors, and the block
READABLE = ("text", "document", "search_result")
OTHER_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking")
DOCUMENTS = ("text", "content")  # the types of their sources
# Claude Code begins its system prompt with such a line. It says something else in every request, so that no prefix of
# the prompt could be shared, and it means nothing to a model.
BILLING = "x-anthropic-billing-header:"


class Message(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content

    def _replace(self, left_out: LeftOut) -> None:
        self.content = readable(self.content, left_out)

    def check_inside(self, place: str) -> None:
        """Raise UnsupportedParameter for a field that may have an effect."""
        self.check_extra(UNSUPPORTED_IN_MESSAGES, HARMLESS_IN_MESSAGES, place)


def chat_messages(
    system: str | list[dict[str, Any]] | None, messages: Sequence[Message], *, late_system: bool = True
) -> list[dict[str, Any]]:
    """Return the messages of a chat completion. Raise RequestError, naming the block, if one is not supported.

    `late_system`: the chat template takes system messages that follow others. Otherwise their text is the user's, in
    <system> tags.
    """
    instructions = _text(block for block in _blocks("system", system or []) if not _is_billing(block))
    chat = [{"role": "system", "content": instructions}] if instructions else []
    for role, blocks in _turns(messages, first_late=0 if instructions else 1, late_system=late_system):
        if role == "assistant":
            chat.append(_assistant(blocks))
        elif role == "user":
            chat.extend(_user(blocks))
        else:
            chat.append({"role": "system", "content": _text(blocks)})
    return chat


def readable(content: Any, left_out: LeftOut) -> Any:
    """Return the content of a message with texts in the place of blocks that the model cannot read."""
    return [_readable(block, left_out) for block in content] if isinstance(content, list) else content


def _readable(block: dict[str, Any], left_out: LeftOut) -> dict[str, Any]:
    match block:
        case {"citations": {"enabled": True}}:
            left_out.mark("citations")
            return _readable({name: value for name, value in block.items() if name != "citations"}, left_out)
        case {"type": "document", "source": {"type": kind, **source}}:
            if kind in DOCUMENTS:
                content = readable(source.get("content"), left_out)
                return {**block, "source": {**source, "type": kind, "content": content}}
        case {"type": "document"}:
            return block
        case {"type": kind} if kind in READABLE or kind in OTHER_BLOCKS:
            return {**block, "content": readable(block["content"], left_out)} if "content" in block else block
    return left_out.parts([block], ())[0]


def num_blocks(content: Any) -> int:
    """Return the number of content blocks, those inside of others included. A text counts as one."""
    if not isinstance(content, list):
        return 1
    inner = (block.get("content") or block.get("source") for block in content if isinstance(block, Mapping))
    return len(content) + sum(num_blocks(each["content"] if _has_content(each) else each) for each in inner if each)


def _has_content(source: Any) -> bool:
    return isinstance(source, Mapping) and "content" in source


def _turns(messages: Sequence[Message], *, first_late: int, late_system: bool) -> Iterator[tuple[str, list[Block]]]:
    """Yield the role and the blocks of each turn. Consecutive messages of one role are one turn, as Anthropic says."""
    given = [(message.role, _blocks(f"messages.{i}.content", message.content)) for i, message in enumerate(messages)]
    if not late_system:
        given[first_late:] = [_in_user_turn(role, blocks) for role, blocks in given[first_late:]]
    for role, turn in groupby(given, key=itemgetter(0)):
        yield role, [block for _, blocks in turn for block in blocks]


def _in_user_turn(role: str, blocks: Iterable[Block]) -> tuple[str, Iterable[Block]]:
    """Return a message of the system as one of the user, and other messages unchanged."""
    if role != "system":
        return role, blocks
    return "user", _blocks("", f"<system>\n{_text(blocks)}\n</system>")


def _blocks(place: str, content: str | Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    if isinstance(content, str):
        yield place, {"type": "text", "text": content}
    else:
        yield from ((f"{place}.{i}", block) for i, block in enumerate(content))


def _is_billing(block: Block) -> bool:
    return str(block[1].get("text")).startswith(BILLING)


def _user(blocks: Sequence[Block]) -> Iterator[dict[str, Any]]:
    """Yield the results of tools, which must follow their calls at once, and then the user's own text."""
    results = [block for block in blocks if block[1].get("type") == "tool_result"]
    yield from map(_tool_result, results)
    others = [block for block in blocks if block[1].get("type") != "tool_result"]
    if others or not results:
        yield {"role": "user", "content": _text(others)}


def _tool_result(given: Block) -> dict[str, Any]:
    place, block = given
    call, content = block.get("tool_use_id"), block.get("content") or ""
    if not isinstance(call, str):
        raise _wrong(f"{place}.tool_use_id", "the id of a tool_use block", call)
    if not isinstance(content, str) and not _is_list_of_objects(content):
        raise _wrong(f"{place}.content", "a string or a list of content blocks", content)
    text = _text(_blocks(f"{place}.content", content))
    return {"role": "tool", "tool_call_id": call, "content": f"Error: {text}" if block.get("is_error") else text}


def _assistant(blocks: Iterable[Block]) -> dict[str, Any]:
    """Return an assistant's message. Thinking that is encrypted for Anthropic's models is left out."""
    readable, thinking, calls = [], [], []
    for place, block in blocks:
        match block:
            case {"type": "thinking", "thinking": str() as text}:
                thinking.append(text)
            case {"type": "thinking" | "redacted_thinking"}:
                pass
            case {"type": "tool_use"}:
                calls.append(_call(place, block))
            case _:
                readable.append((place, block))
    message: dict[str, Any] = {"role": "assistant", "content": _text(readable)}
    if thinking:
        message["reasoning_content"] = "\n".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(place: str, block: Mapping[str, Any]) -> dict[str, Any]:
    identity, name, arguments = block.get("id"), block.get("name"), block.get("input")
    for field, value in (("id", identity), ("name", name)):
        if not isinstance(value, str):
            raise _wrong(f"{place}.{field}", "a string", value)
    if not isinstance(arguments, str | Mapping | None):
        arguments = to_json(arguments).decode()
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(blocks: Iterable[Block]) -> str:
    """Return the text of blocks. Raise UnsupportedParameter, naming the block, if one is not text."""
    texts = [_text_of(place, block) for place, block in blocks]
    return "\n".join(text for text in texts if text)


def _text_of(place: str, block: Mapping[str, Any]) -> str:
    match block:
        case {"type": "text", "text": str() as text}:
            return text
        case {"type": "document", "source": {"type": "text", "data": str() as text}}:
            return _titled(place, block, text)
        case {"type": "document", "source": {"type": "content", "content": str() | list() as content}}:
            return _titled(place, block, _text(_blocks(f"{place}.source.content", content)))
        case {"type": "search_result", "content": list() as content}:
            return _titled(place, block, _text(_blocks(f"{place}.content", content)))
        case {"type": "document", "source": {"type": kind}}:
            reason = f"this model reads documents of type text or content ({HINT})"
            raise _unsupported(f"{place}.source.type", kind, reason)
        case {"type": str() as kind} if kind in READABLE:
            raise RequestError(f"{place} is not a valid {kind} block", field=place)
        case {"type": str() as kind}:
            raise _unsupported(f"{place}.type", kind, f"this model reads text only ({HINT})")
    raise RequestError(f"{place} must be a content block: an object with a type", field=place)


def _titled(place: str, block: Mapping[str, Any], text: str) -> str:
    """Return a text below the title, the source and the context that a document or search result gives."""
    match block.get("citations"):
        case {"enabled": True}:
            raise _unsupported(
                f"{place}.citations.enabled", True, "citations are not supported (--replace-unsupported ignores them)"
            )
    headings = [block.get(name) for name in ("title", "source", "context")]
    return "\n".join([*(heading for heading in headings if isinstance(heading, str) and heading), text])


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)


def _wrong(field: str, what: str, value: Any) -> RequestError:
    return RequestError(f"{field} must be {what}", field=field, value=value)


def _unsupported(field: str, value: Any, reason: str) -> UnsupportedParameter:
    return UnsupportedParameter(f"{field} is {str(value)[:40]!r}: {reason}", field=field, value=value)
