"""Incremental detokenization at a constant cost per token, without incomplete characters.

The decoders of the supported families map a token to bytes that do not depend on its position, so that a stream is a
table look-up and an incremental UTF-8 decoder. `byte_table` recognizes them. For other decoders the stream of the
tokenizers library is used.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer as HfTokenizer
from tokenizers.decoders import Decoder, DecodeStream

TokenBytes = Callable[[str], bytes]

SPACE = "\u2581"  # the character with which sentencepiece replaces a space
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ByteDetokenizer:
    """A detokenizer for tokens that are bytes. `strip_space`: the first space is not part of the text."""

    def __init__(self, token_bytes: Callable[[int], bytes], *, strip_space: bool = False):
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = strip_space

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the text that is complete now."""
        data = b"".join(map(self._token_bytes, token_ids))
        if self._strip_space and data:
            data, self._strip_space = data.removeprefix(b" "), False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Return a replacement character if the text ends with an incomplete character, else ""."""
        return self._decoder.decode(b"", final=True)


class StreamDetokenizer:
    """A detokenizer for other kinds of tokens, e.g. WordPiece, using the stream of the tokenizers library."""

    def __init__(self, tokenizer: HfTokenizer, *, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the text that is complete now."""
        return "".join(self._stream.step(self._tokenizer, token) or "" for token in token_ids)

    def flush(self) -> str:
        """Return "", because such tokens are whole characters."""
        return ""


def byte_table(decoder: Decoder | None) -> tuple[TokenBytes, bool] | None:
    """Return a decoder's map from token to bytes, and whether it strips a leading space.

    Return None for decoders that cannot be described by such a map.
    """
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level, False
    if kinds == ["Metaspace"] and steps[0]["replacement"] == SPACE:
        return _sentencepiece, steps[0].get("prepend_scheme", "always") != "never"
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or not _replaces_space(steps[0]):
        return None
    if kinds[3:] == []:
        return _sentencepiece, False
    if kinds[3:] == ["Strip"] and steps[3] == {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
        return _sentencepiece, True
    return None


def _replaces_space(step: dict) -> bool:
    return (step["pattern"], step["content"]) == ({"String": SPACE}, " ")


def _sentencepiece(token: str) -> bytes:
    match = BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace(SPACE, " ").encode()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(BYTE_OF[character] for character in token)
    except KeyError:  # an added token, which is plain text
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's byte of each character: printable bytes are themselves, other bytes are characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF = _byte_alphabet()
