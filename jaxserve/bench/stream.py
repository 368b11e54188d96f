"""Reading a streamed answer: server-sent events, and the completion that they carry."""

import json
from typing import Any

from jaxserve.bench.record import RequestRecord

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
DONE = "[DONE]"
# Fields of a chat's delta that carry tokens.
TOKEN_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call")
MAX_ERROR_CHARACTERS = 200
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class EventParser:
    """A parser that turns a stream of bytes, split anywhere by the network, into the data of its events.

    It follows the event stream format of the HTML standard and ignores all fields but `data`.
    """

    def __init__(self) -> None:
        self._unfinished_line = b""
        self._event_lines: list[bytes] = []  # data lines of the unfinished event
        self._started = self._after_return = False

    def feed(self, chunk: bytes) -> list[str]:
        """Return the data of the events that `chunk` completes."""
        if self._after_return:
            # A \n at the start belongs to the \r that ended the chunk before.
            chunk = chunk.removeprefix(b"\n")
            self._after_return = False
        if not chunk:
            return []
        # bytes.splitlines splits at \n, \r and \r\n alone, as the standard wants; str.splitlines knows more line ends.
        lines = (self._unfinished_line + chunk).splitlines(keepends=True)
        self._after_return = lines[-1].endswith(b"\r")
        self._unfinished_line = b"" if lines[-1].endswith((b"\n", b"\r")) else lines.pop()
        events = (self._line(line.rstrip(b"\r\n")) for line in lines)
        return [event for event in events if event is not None]

    def close(self) -> list[str]:
        """Return the data of an event that the stream broke off before its empty line."""
        lines = [self._unfinished_line, b""]
        self._unfinished_line = b""
        events = (self._line(line) for line in lines)
        return [event for event in events if event is not None]

    def _line(self, line: bytes) -> str | None:
        """Take in one line and return the event's data if this empty line ends an event."""
        if not self._started:
            line = line.removeprefix(BYTE_ORDER_MARK)
            self._started = True
        if line.startswith(b"data:"):
            self._event_lines.append(line[5:].removeprefix(b" "))
        elif line == b"data":
            self._event_lines.append(b"")
        elif not line and self._event_lines:
            data = b"\n".join(self._event_lines)
            self._event_lines = []
            return data.decode(errors="replace")
        return None


class AnswerReader:
    """A reader of one answer's events, which fills in the answer's `RequestRecord`."""

    def __init__(self, record: RequestRecord):
        self._record = record
        self._text: list[str] = []
        # Whether a finish_reason or [DONE] has arrived.
        self._finished = False
        # Whether the last chunk had a finish_reason and no text. It may stand for a token, such as eos, or for none.
        self._ends_without_text = False
        self._usage: dict[str, Any] = {}
        self._error: str | None = None

    def feed(self, data: str, time_s: float) -> None:
        """Take in the data of one event that arrived at `time_s`.

        The first error is the one recorded; tokens that follow it still count.
        """
        if data == DONE:
            self._finished = True
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
        """Complete the record at the end of the stream: text, token counts, and what is missing as an error."""
        record = self._record
        record.text = "".join(self._text)
        reported = self._reported_tokens("completion_tokens")
        if reported == 0:
            record.chunk_times_s.clear()
        elif self._ends_without_text and (reported is None or len(record.chunk_times_s) == reported + 1):
            # The last chunk carried no token, only the reason for the end.
            record.chunk_times_s.pop()
        # Without usage every chunk counts as a token: a client cannot know better.
        record.output_tokens = len(record.chunk_times_s) if reported is None else reported
        record.input_tokens = self._reported_tokens("prompt_tokens") or record.input_tokens
        if not self._finished:
            self._fail("the stream ended without [DONE] or a finish_reason")
        elif not record.chunk_times_s:
            self._fail("the stream contained no tokens")
        record.error = record.error or self._error

    def _chunk(self, event: dict[str, Any], time_s: float) -> None:
        usage = event.get("usage")
        self._usage = usage if isinstance(usage, dict) else self._usage
        if not event.get("choices"):
            return
        choice = event["choices"][0]
        self._finished = self._finished or choice.get("finish_reason") is not None
        delta = choice.get("delta")
        if delta is None:
            # A completion, not a chat. A token without text, such as half of a character, counts too.
            self._text.append(_text(choice.get("text")))
            self._record.chunk_times_s.append(time_s)
            self._ends_without_text = choice.get("finish_reason") is not None and not self._text[-1]
        elif any(delta.get(field) for field in TOKEN_FIELDS):
            self._text.append(_text(delta.get("content")))
            self._record.chunk_times_s.append(time_s)

    def _reported_tokens(self, name: str) -> int | None:
        """Return the number of tokens that the server reported, or None if it reported no valid number."""
        count = self._usage.get(name)
        return count if type(count) is int and count >= 0 else None

    def _fail(self, reason: str) -> None:
        self._error = self._error or reason


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"text is {type(value).__name__}")
    return value or ""


def message_of(body: Any) -> str:
    """Return the message in an error's JSON, in any form that servers use, or else the JSON itself."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return error if isinstance(error, str) else json.dumps(error)


def on_one_line(text: str) -> str:
    """Return text as one line, cut to `MAX_ERROR_CHARACTERS`, without characters that steer a terminal."""
    line = " ".join("".join(c if c.isprintable() or c.isspace() else REPLACEMENT for c in text).split())
    return line if len(line) <= MAX_ERROR_CHARACTERS else f"{line[:MAX_ERROR_CHARACTERS]}..."
