"""Reading a streamed answer: server-sent events, and what the events of a completion say."""

import json
from typing import Any

from jaxserve.bench.record import RequestRecord

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
DONE = "[DONE]"
TOKEN_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call")  # of a chat's delta
SHOWN_CHARACTERS = 200  # of a server's error message
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class EventParser:
    """Cuts a stream of bytes into the data of its events, wherever the network has split it.

    Follows the event stream format of the HTML standard; fields other than `data` are of no interest here.
    """

    def __init__(self) -> None:
        self._rest = b""  # of a line whose end has not come
        self._data: list[bytes] = []  # lines of an event whose end has not come
        self._started = self._after_return = False

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that `chunk` completes. Mutates."""
        if self._after_return:  # a \n that belongs to the \r before it
            chunk = chunk.removeprefix(b"\n")
            self._after_return = False
        if not chunk:
            return []
        lines = (self._rest + chunk).splitlines(keepends=True)  # of bytes: at \n, \r and \r\n alone
        self._after_return = lines[-1].endswith(b"\r")
        self._rest = b"" if lines[-1].endswith((b"\n", b"\r")) else lines.pop()
        events = (self._line(line.rstrip(b"\r\n")) for line in lines)
        return [event for event in events if event is not None]

    def close(self) -> list[str]:
        """The data of an event that the stream broke off before its empty line. Mutates."""
        lines = [self._rest, b""]
        self._rest = b""
        events = (self._line(line) for line in lines)
        return [event for event in events if event is not None]

    def _line(self, line: bytes) -> str | None:
        """The event's data, if this line is the empty one that ends it."""
        if not self._started:
            line = line.removeprefix(BYTE_ORDER_MARK)
            self._started = True
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif line == b"data":
            self._data.append(b"")
        elif not line and self._data:
            data = b"\n".join(self._data)
            self._data = []
            return data.decode(errors="replace")
        return None


class AnswerReader:
    """One answer in the making. Mutates the record that it is given."""

    def __init__(self, record: RequestRecord):
        self._record = record
        self._text: list[str] = []
        self._ended = False  # by a finish_reason or [DONE]
        self._bare_end = False  # the last chunk had a finish_reason and no text: a token, such as eos, or none
        self._usage: dict[str, Any] = {}
        self._error: str | None = None

    def feed(self, data: str, time_s: float) -> None:
        """One event's data, which arrived at `time_s`. The first error stands; what follows it still counts."""
        if data == DONE:
            self._ended = True
            return
        try:
            event = json.loads(data)
            if not isinstance(event, dict):
                raise ValueError
            if event.get("error") is not None:
                self._fail(f"error in the stream: {message_of(event)}")
            else:
                self._chunk(event, time_s)
        except (ValueError, TypeError, AttributeError, LookupError):
            self._fail(f"malformed event: {data}")

    def close(self) -> None:
        """The stream has ended: fills in what the record says of the whole, or why there is no whole."""
        record = self._record
        record.text = "".join(self._text)
        told = self._counted("completion_tokens")
        if told == 0:
            record.chunk_times_s.clear()
        elif self._bare_end and (told is None or len(record.chunk_times_s) == told + 1):
            record.chunk_times_s.pop()  # it only said why the answer ended
        # Without usage every chunk counts as a token, the best that can be known from outside.
        record.output_tokens = len(record.chunk_times_s) if told is None else told
        record.input_tokens = self._counted("prompt_tokens") or record.input_tokens
        if not self._ended:
            self._fail("the stream ended without [DONE] or a finish_reason")
        elif not record.chunk_times_s:
            self._fail("the stream brought no tokens")
        record.error = record.error or self._error

    def _chunk(self, event: dict[str, Any], time_s: float) -> None:
        usage = event.get("usage")
        self._usage = usage if isinstance(usage, dict) else self._usage
        if not event.get("choices"):
            return
        choice = event["choices"][0]
        self._ended = self._ended or choice.get("finish_reason") is not None
        delta = choice.get("delta")
        if delta is None:  # a completion: also a token without text, such as half of a character, is one
            self._text.append(_text(choice.get("text")))
            self._record.chunk_times_s.append(time_s)
            self._bare_end = choice.get("finish_reason") is not None and not self._text[-1]
        elif any(delta.get(field) for field in TOKEN_FIELDS):
            self._text.append(_text(delta.get("content")))
            self._record.chunk_times_s.append(time_s)

    def _counted(self, name: str) -> int | None:
        """Tokens, as the server counts them; None if it says no number that could be one."""
        count = self._usage.get(name)
        return count if type(count) is int and count >= 0 else None

    def _fail(self, reason: str) -> None:
        self._error = self._error or reason


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"text is {type(value).__name__}")
    return value or ""


def message_of(body: Any) -> str:
    """The message in an error's JSON, in the forms that servers use; the JSON itself if it has none."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return error if isinstance(error, str) else json.dumps(error)


def on_one_line(text: str) -> str:
    """On one line, not too long for a table, and without what would steer a terminal."""
    line = " ".join("".join(c if c.isprintable() or c.isspace() else REPLACEMENT for c in text).split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}..."
