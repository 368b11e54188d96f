"""Incremental detokenization, without incomplete characters.

The same rule holds for every tokenizer: a character that is not complete yet is held back, and one that never becomes
complete is a replacement character, U+FFFD. So the pieces of a stream are together the text of `Tokenizer.decode`.
"""

import codecs
from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
MAX_HELD = 16  # tokens that are held back for a character; the longest one has 4 bytes


class ByteDetokenizer:
    """A detokenizer for tokens that are bytes, at a constant cost per token."""

    def __init__(self, token_bytes: Callable[[int], bytes], *, strip: int = 0, begun: bytes = b""):
        """`strip`: the number of spaces at the beginning that are not part of the text.

        `begun`: the bytes of a character with which the text before ends. If the tokens go on with it, the whole
        character is part of their text.
        """
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip
        self._begun = begun

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the text that is complete now."""
        data = b"".join(map(self._token_bytes, token_ids))
        if self._begun and data:
            data, self._begun = (self._begun + data if is_continuation(data) else data), b""
        if self._strip and data:
            stripped = min(self._strip, len(data) - len(data.lstrip(b" ")))
            data = data[stripped:]
            self._strip = 0 if data else self._strip - stripped
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Return a replacement character if the text ends with an incomplete character, else ""."""
        return self._decoder.decode(b"", final=True)


class StreamDetokenizer:
    """A detokenizer for tokens whose text depends on those around them."""

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        """`decode` returns the text of token ids."""
        self._decode = decode
        self._ids: list[int] = []  # those shown last, and those held back
        self._num_shown = 0  # of these

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the text that is complete now."""
        return "".join(map(self._push, token_ids))

    def _push(self, token_id: int) -> str:
        self._ids.append(token_id)
        if self._decode(self._ids).endswith(REPLACEMENT) and len(self._ids) - self._num_shown < MAX_HELD:
            return ""
        return self.flush()

    def flush(self) -> str:
        """Return the text of the tokens held back, with replacement characters for an incomplete character."""
        shown, text = self._decode(self._ids[: self._num_shown]), self._decode(self._ids)
        if len(text) > len(shown):
            del self._ids[: self._num_shown]
            self._num_shown = len(self._ids)
        elif len(self._ids) - self._num_shown >= MAX_HELD:
            del self._ids[self._num_shown :]  # hidden tokens: fewer may show once another one follows, such as a space
        return text[len(shown) :]


def is_continuation(data: bytes) -> bool:
    """Return whether bytes of UTF-8 begin inside a character."""
    return bool(data) and 0x80 <= data[0] < 0xC0
