"""The bytes of each token of a vocabulary: what it adds to a text, wherever in the text it is.

Two encodings of bytes are in use. In a byte-level vocabulary each character of a token stands for a byte. In one of
sentencepiece a token is text, with U+2581 for a space, and bytes that no other token has are tokens of their own, such
as `<0xE2>`. The steps of a decoder say which of them it reads. Where a decoder has other steps, its effect on every
token is measured.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from jaxserve.core.panics import LibraryPanicked, panics_as_exceptions

SPACE = "\u2581"  # the character with which sentencepiece replaces a space
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
REPLACEMENT = "\ufffd"

Spelling = str | bytes  # a token on its way through a decoder: text, or the bytes that it turned out to be
Step = Callable[[Spelling], Spelling]


@dataclass(frozen=True)
class TokenBytes:
    """The bytes of tokens, given as the vocabulary writes them. A text loses up to `stripped` leading spaces."""

    of: Callable[[str], bytes]
    stripped: int = 0


def token_bytes(tokenizer: HfTokenizer) -> TokenBytes | None:
    """Return the bytes of a tokenizer's tokens, or None if they depend on the tokens around them or are not known."""
    decoder = tokenizer.decoder
    if decoder is not None:
        steps = list(_flat(json.loads(decoder.__getstate__())))
    elif tokenizer.pre_tokenizer is not None and b'"ByteLevel"' in tokenizer.pre_tokenizer.__getstate__():
        steps = [{"type": "ByteLevel"}]  # as it encodes
    else:
        return _measured_if_possible(tokenizer)
    if tokenizer.token_to_id("<0x00>") is not None and tokenizer.token_to_id("<0xFF>") is not None:
        steps.insert(0, {"type": "ByteFallback"})
    return None if _joins_tokens(steps) else _from_steps(steps) or _measured_if_possible(tokenizer)


def _joins_tokens(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a step may change a text that several tokens write together, other than its leading spaces."""
    fusing = [index for index, step in enumerate(steps) if step["type"] in ("Fuse", "ByteLevel")]
    return any(_concerns_whole_texts(step) for step in (steps[fusing[0] + 1 :] if fusing else ()))


def _concerns_whole_texts(step: Mapping[str, Any]) -> bool:
    match step:
        case {"type": "Fuse" | "ByteLevel" | "ByteFallback"} | {"type": "Metaspace", "prepend_scheme": "never"}:
            return False
        case {"type": "Replace"}:
            return len(_replaced(step)) != 1
        case _:
            return not _strips_spaces(step)


def _strips_spaces(step: Mapping[str, Any]) -> bool:
    """Return whether a step takes spaces from the beginning of a text, and nothing from its end."""
    match step:
        case {"type": "Strip", "content": " ", "stop": 0}:
            return True
    return False


def _replaced(step: Mapping[str, Any]) -> str:
    """Return the text that a step replaces, "" if it is that of a regular expression which is not a plain text."""
    pattern = step["pattern"]
    text: str = pattern.get("String") or pattern["Regex"]
    return text if "String" in pattern or text == re.escape(text) else ""


def _flat(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a decoder, those of nested sequences as well."""
    if decoder["type"] == "Sequence":
        for each in decoder["decoders"]:
            yield from _flat(each)
    else:
        yield decoder


def _from_steps(steps: Sequence[Mapping[str, Any]]) -> TokenBytes | None:
    """Return the bytes of tokens by what the steps do to one token; None if a step may concern several at once."""
    functions: list[Step] = []
    fused, stripped = False, 0
    for step in steps:
        match step:
            case {"type": "Fuse"}:
                fused = True
            case {"type": "ByteFallback"}:
                functions.append(_byte_fallback)
            case {"type": "ByteLevel"}:
                functions.append(_byte_level)
                fused = True
            case {"type": "Metaspace", "replacement": space}:
                functions.append(_replacing(space, " "))
                stripped = max(stripped, int(step.get("prepend_scheme", "always") != "never"))
            case {"type": "Replace", "content": new} if old := _replaced(step):
                functions.append(_replacing(old, new))
            case {"type": "Strip", "start": most} if fused and _strips_spaces(step):
                stripped += most
            case _:
                return None

    def of(token: str) -> bytes:
        spelling: Spelling = token
        for function in functions:
            spelling = function(spelling)
        return spelling.encode() if isinstance(spelling, str) else spelling

    return TokenBytes(of, stripped)


def _replacing(old: str, new: str) -> Step:
    def replace(token: Spelling) -> Spelling:
        if isinstance(token, str):
            return token.replace(old, new)
        # A character of several bytes may be written by several tokens: it stays, whatever the decoder does.
        return token.replace(old.encode(), new.encode()) if old.isascii() else token

    return replace


def _byte_fallback(token: Spelling) -> Spelling:
    match = BYTE_TOKEN.fullmatch(token) if isinstance(token, str) else None
    return bytes([int(match[1], 16)]) if match else token


def _byte_level(token: Spelling) -> Spelling:
    if isinstance(token, bytes):
        return token
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


def _measured_if_possible(tokenizer: HfTokenizer) -> TokenBytes | None:
    """Return the measured bytes of tokens, or None if the decoder fails at some of them."""
    try:
        with panics_as_exceptions():
            return _measured(tokenizer)
    except LibraryPanicked:
        return None


def _measured(tokenizer: HfTokenizer) -> TokenBytes | None:
    """Return the bytes of tokens by the text that each adds after another token.

    Return None if that text depends on what follows, or if it is part of a character in an unknown encoding.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    word = next((token for token in vocabulary if token.isascii() and token.isalnum() and token not in added), None)
    if word is None:
        return None
    anchor = vocabulary[word]
    first: str = tokenizer.decode([anchor])
    pairs = tokenizer.decode_batch([[anchor, id] for id in vocabulary.values()], skip_special_tokens=False)
    table: dict[str, bytes] = {}
    for token, text in zip(vocabulary, pairs, strict=True):
        data = _spelled(token, text[len(first) :])
        if data is None or not text.startswith(first):
            return None
        table[token] = data
    inside = table[word]
    alternating = [id for other in vocabulary.values() for id in (anchor, other)]
    expected = b"".join(inside + data for data in table.values()).removeprefix(inside).decode("utf-8", "replace")
    if first + expected != tokenizer.decode(alternating, skip_special_tokens=False):
        return None
    if inside not in (first.encode(), b" " + first.encode()):
        return None
    alone = tokenizer.decode_batch([[id] for id in vocabulary.values()], skip_special_tokens=False)
    spaced = [(data, text.encode()) for data, text in zip(table.values(), alone, strict=True) if data.startswith(b" ")]
    losses = {len(data) - len(text) for data, text in spaced if data.endswith(text)}
    if len(losses) > 1:
        return None
    return TokenBytes(lambda token: table.get(token, b""), stripped=max(losses, default=0))


def _spelled(token: str, text: str) -> bytes | None:
    """Return the bytes of a token that adds a text. If it is part of a character, they are those of its encoding."""
    if REPLACEMENT not in text or REPLACEMENT in token:
        return text.encode()
    data = [step(token) for step in (_byte_fallback, _byte_level)]
    return next((each for each in data if isinstance(each, bytes) and each.decode("utf-8", "replace") == text), None)
