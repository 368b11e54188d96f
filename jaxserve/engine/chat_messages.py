"""The messages of a conversation as users write them: what each must have, in the library as in the server."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxserve.core.errors import RequestError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}

MAY_BE_SILENT = frozenset({"assistant", "tool"})  # roles of messages that may have no content, such as those of calls
MAX_SHOWN = 80  # characters of a wrong value in an error


def checked_messages(messages: Any) -> list[Message]:
    """Return the messages of a conversation, with content that is text.

    Raise `RequestError` naming the field if a message is no object with a role, or its content is neither a text nor a
    list of text parts.
    """
    several = isinstance(messages, Iterable) and not isinstance(messages, str | bytes | Mapping)
    checked = [_checked(message, f"messages.{index}") for index, message in enumerate(messages)] if several else []
    if not checked:
        raise _wrong("messages", messages, "a list of messages, each an object with role and content")
    return checked


def _checked(message: Any, place: str) -> Message:
    if not isinstance(message, Mapping):
        raise _wrong(place, message, "an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise _wrong(f"{place}.role", role, "a text, such as 'user'")
    if content is None:
        return {**message, "content": silent_content(role, message.get("refusal"), place)}
    if isinstance(content, list | tuple):
        return {**message, "content": text_of(content, f"{place}.content")}
    if not isinstance(content, str):
        raise _wrong(f"{place}.content", content, "a text or a list of text parts")
    return message


def silent_content(role: str, refusal: str | None, place: str) -> str:
    """Return the content of a message without any: what an assistant said instead, or nothing.

    Raise `RequestError`, naming the message's `place`, for a role whose messages need content.
    """
    if refusal or role in MAY_BE_SILENT:
        return refusal or ""
    raise _wrong(f"{place}.content", None, "a text or a list of text parts")


def text_of(content: str | Sequence[Mapping[str, Any]] | None, place: str = "messages.content") -> str:
    """Return a message's content as text, joining text parts. Raise `RequestError` for parts of another type."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content or ()):
        match part:
            case {"type": "text", "text": str() as text} | {"type": "refusal", "refusal": str() as text}:
                texts.append(text)
            case _:
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise RequestError(
                    f"{place}.{index} is {str(kind)[:40]!r}, but this model reads text only: a part must be an "
                    "object with the type text, and its text",
                    field=place,
                    value=kind,
                    limit="text",
                )
    return "\n".join(texts)


def _wrong(field: str, value: Any, limit: str) -> RequestError:
    message = f"{field} is {repr(value)[:MAX_SHOWN]}: it must be {limit}"
    return RequestError(message, field=field, value=value, limit=limit)
