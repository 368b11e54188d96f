"""Texts in the place of what a model cannot read: images, files, and the work of tools that another server has run.

With `--replace-unsupported` the bodies of requests rewrite their histories by a `LeftOut` when they are made, so that
everything after that reads text alone.
"""

import base64
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import unquote

from jaxserve.server.http.json_text import to_json

T = TypeVar("T")
# The key of pydantic's validation context that holds the request's `LeftOut`, None if such requests are refused.
LEFT_OUT = "left_out"
HINT = "--replace-unsupported puts a text in its place"
HEADER = "x-jaxserve-left-out"
# What types of content parts are called in the text.
MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("file", "input_file", "container_upload"), "file"),
    "document": "document",
}
# Fields with text for the model, or with objects that have such fields.
TEXT_FIELDS = frozenset(
    {
        *("title", "tool_name", "filename", "url", "text", "transcript", "summary", "code", "lines", "message"),
        *("content", "results", "sources", "tool_references", "output", "outputs", "stdout", "stderr", "logs"),
        *("error", "error_code"),
    }
)
# Fields with what a tool was called with, in this order of preference.
ARGUMENT_FIELDS = ("arguments", "input", "action", "operation", "queries")
KIND = re.compile(r"[a-z][a-z0-9_]{0,39}")
OTHER = "item"  # what a type of another form is called
MAX_KINDS = 16  # in the header
TEXT_DATA = re.compile(r"data:text/[^,]*?(;base64)?,", re.IGNORECASE)


class LeftOut:
    """Puts texts in the place of what the model cannot read, and counts by kind what is left out. Methods mutate it."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._counts)

    def __str__(self) -> str:
        """Return what has been left out, as the header shows it: "image=2, file=1"."""
        return ", ".join(f"{kind}={count}" for kind, count in self._counts.most_common(MAX_KINDS))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of what has been left out, in alphabetical order."""
        return tuple(sorted(self._counts)[:MAX_KINDS])

    def mark(self, kind: str) -> str:
        """Count something that is left out, and return the text in its place, such as "[image left out]"."""
        kind = _safe(kind)
        self._counts[kind] += 1
        return f"[{kind.replace('_', ' ')} left out]"

    def parts(self, content: T, readable: Collection[str], kind: str = "text") -> T | list[Any]:
        """Return a list of content parts with text parts of the type `kind` in the place of those not `readable`.

        What is no part, and content that is no list, stays for the error that it causes.
        """
        if not isinstance(content, list):
            return content
        return [
            {"type": kind, "text": self.text(part)} if _has_other_type(part, readable) else part for part in content
        ]

    def text(self, item: Mapping[str, Any]) -> str:
        """Return the text in the place of an item or part: its own text below its type, if it has any."""
        kind = str(item.get("type"))
        if kind in MEDIA:
            return self._medium(item, MEDIA[kind])
        texts = [*self._arguments(item), *self._texts(item)]
        if not texts:
            return self.mark(kind)
        name = f": {item['name']}" if isinstance(item.get("name"), str) else ""
        return "\n".join([f"[{_safe(kind).replace('_', ' ')}{name}]", *texts])

    def output(self, item: Mapping[str, Any]) -> str:
        """Return the text of a tool's result without its type, or its status if it has none."""
        texts = [*self._texts(item)]
        status = item.get("status")
        return "\n".join(texts) or (status if isinstance(status, str) else self.mark(str(item.get("type"))))

    def arguments(self, item: Mapping[str, Any]) -> str:
        """Return what a tool was called with, as JSON, "{}" if it is not known."""
        return next(self._arguments(item), "{}")

    def _arguments(self, item: Mapping[str, Any]) -> Iterator[str]:
        for name in ARGUMENT_FIELDS:
            if value := item.get(name):
                yield value if isinstance(value, str) else to_json(value).decode()
                return

    def _texts(self, value: Any) -> Iterator[str]:
        """Yield the texts in a value, and what stands for parts of it that are no text."""
        match value:
            case str() if value and not value.startswith("data:"):
                yield value
            case list():
                for entry in value:
                    yield from self._texts(entry)
            case {"type": str() as kind} if kind in MEDIA:
                yield self._medium(value, MEDIA[kind])
            case Mapping():
                for name, entry in value.items():
                    if name in TEXT_FIELDS:
                        yield from self._texts(entry)

    def _medium(self, part: Mapping[str, Any], name: str) -> str:
        """Return the text of a file or document below its name, or that it is left out."""
        file = part[name] if isinstance(part.get(name), Mapping) else part
        title = next((title for key in ("title", "filename") if isinstance(title := file.get(key), str)), "")
        text = _text_of_file(file)
        if text is None and isinstance(source := file.get("source"), Mapping):
            text = "\n".join(self._texts(source.get("content"))) or None
        return "\n".join(filter(None, (title, self.mark(name) if text is None else text)))


def _has_other_type(part: Any, known: Collection[str]) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind not in known


def _safe(kind: str) -> str:
    """Return a type that a client has written as it may stand in a prompt and in a header."""
    return kind if KIND.fullmatch(kind) else OTHER


def _text_of_file(file: Mapping[str, Any]) -> str | None:
    """Return the text of a file or document of plain text, None if it is none."""
    match file:
        case {"source": {"type": "text", "data": str() as text}}:
            return text
        case {"transcript": str() as text}:
            return text
        case {"source": {"media_type": str() as kind, "data": str() as data}} if kind.startswith("text/"):
            return _decoded(data)
        case {"file_data": str() as url} if found := TEXT_DATA.match(url):
            return _decoded(url[found.end() :]) if found[1] else unquote(url[found.end() :])
    return None


def _decoded(data: str) -> str | None:
    try:
        return base64.b64decode(data, validate=True).decode()
    except ValueError:  # neither base64 nor, decoded, UTF-8
        return None
