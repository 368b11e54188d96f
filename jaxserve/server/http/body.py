"""Parsing of JSON bodies in a bounded time.

The cost of a body depends on the number of its items (list entries, fields, objects), far more than on its bytes.
Items are therefore counted first, without parsing. A body is parsed only if it has at most `MAX_ITEMS` items, not
counting the entries of the fields that hold prompts or token ids. Those may be as many as the tokens that the queue has
room for, and the tokens of the vocabulary.
"""

import json
import re
import zlib
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json
from starlette.exceptions import HTTPException

from jaxserve.core.errors import RequestError

# Items outside TOKEN_FIELDS. A chat message, or one of its parts, takes three or four.
MAX_ITEMS = 50_000
TOKEN_FIELDS = (
    *("prompt", "input", "tokens", "allowed_token_ids"),
    *("text_1", "text_2", "queries", "documents", "items", "data_1", "data_2"),  # of scores
)
ENCODINGS = frozenset({"gzip", "x-gzip", "deflate"})
MAX_DEPTH = 201  # lists and objects in one another, the body itself included, which pydantic's parser takes
MAX_DIGITS = 400  # a float has at most 309 digits before its point
TOO_DEEP = "recursion limit exceeded"  # how the parser begins to say it
DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
# The escape of a surrogate that is not half of a pair, where no backslash is itself escaped.
HIGH, LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
LONE_SURROGATE = re.compile(rb"%b(?!%b)|(?<!%b)%b" % (HIGH, LOW, HIGH, LOW))
ESCAPED_BACKSLASH, PLACEHOLDER = rb"\\", b"\0\0"
# If a body has too many items, only its beginning is parsed, to name the field in the error.
HEAD_BYTES = 64 * 1024


def parse_body(body: bytes, max_token_items: int) -> Any:
    """Return the value of a strict JSON body: UTF-8, no NaN, bounded nesting. A lone surrogate becomes U+FFFD.

    Raise HTTPException if the body is not JSON, and RequestError if it has too many items.
    """
    body = _utf8(body)
    limit = MAX_ITEMS + max_token_items
    if (count := count_items(body, limit)) > limit:
        raise _too_many(_parse_beginning(body), count, limit)
    value = strict_json(body)
    if count > MAX_ITEMS and (others := count - _token_items(value)) > MAX_ITEMS:
        raise _too_many(value, others, MAX_ITEMS)
    return value


def strict_json(body: bytes) -> Any:
    """Return the value of JSON text, in which the escape of a lone surrogate stands for U+FFFD.

    Raise HTTPException unless the text is strict JSON (RFC 8259).
    """
    body = _utf8(body)
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        mended = without_lone_surrogates(body)
        if mended == body:
            raise HTTPException(400, f"the body is not valid JSON: {json_fault(error)}") from error
    return strict_json(mended)


def json_fault(error: ValueError) -> str:
    """Return what the parser says is wrong with a JSON text, with the limit if it has too many levels."""
    deep = str(error).startswith(TOO_DEEP)
    return f"it has more than {MAX_DEPTH} levels of lists and objects, which is the limit" if deep else str(error)


def without_lone_surrogates(text: bytes) -> bytes:
    """Return JSON text in which each escape of a lone surrogate, which no UTF-8 can hold, is one of U+FFFD.

    A string that was cut inside a pair, in JavaScript for instance, has such a surrogate at its end.
    """
    if PLACEHOLDER in text:  # it is no JSON
        return text
    text = text.replace(ESCAPED_BACKSLASH, PLACEHOLDER)
    return LONE_SURROGATE.sub(rb"\\ufffd", text).replace(PLACEHOLDER, ESCAPED_BACKSLASH)


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Return a body decompressed. Raise HTTPException if it is damaged or larger than `limit` bytes decompressed."""
    # Some clients send deflate without zlib's header.
    raw = encoding == "deflate" and body[0] & 0x0F != 8
    # 32 accepts the header of gzip or of zlib.
    decompressor = zlib.decompressobj(-zlib.MAX_WBITS if raw else zlib.MAX_WBITS | 32)
    try:
        whole = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        raise HTTPException(400, f"the body is not valid {encoding} (header content-encoding): {error}") from error
    if len(whole) > limit:
        raise body_too_large(limit)
    if not decompressor.eof or decompressor.unused_data:
        state = "has data after its end" if decompressor.eof else "is cut off"
        raise HTTPException(400, f"the body is {encoding} (header content-encoding) that {state}")
    return whole


def body_too_large(limit: int, size: int | None = None, headers: dict[str, str] | None = None) -> HTTPException:
    """Return the error for a body of more than `limit` bytes. `size`: None if the rest has not been read."""
    got = f"more than {limit}" if size is None else str(size)
    message = f"the body has {got} bytes, the limit is {limit} (--max-body-mb)"
    return HTTPException(413, message, headers)


def count_items(body: bytes, limit: int, *, check_digits: bool = True) -> int:
    """Return the number of items in a JSON text, or any number above `limit` if it has more.

    An object or a list counts as one, and so does each of its entries but the first. Every step is a pass in C over the
    text. The step that makes a list of strings comes after their number is known to be bounded. With `check_digits`,
    raise HTTPException if a number of a large body has more than `MAX_DIGITS` digits, since pydantic would parse it in
    a time that grows with their square.
    """
    # For a small body the upper bound, which also counts delimiters in strings, is enough.
    if (count := _count_delimiters(body)) <= MAX_ITEMS and len(body) <= HEAD_BYTES:
        return count
    # Without escapes every quote begins or ends a string.
    body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if (fields := body.count(b'"') // 4) > limit:
        return fields
    outside = b"".join(body.split(b'"')[::2])
    if check_digits and b"0" * (MAX_DIGITS + 1) in outside.translate(DIGITS_TO_ZERO):
        raise HTTPException(400, f"the body has a number with more than {MAX_DIGITS} digits, which is the limit")
    return _count_delimiters(outside)


def _count_delimiters(text: bytes) -> int:
    return text.count(b",") + text.count(b"{") + text.count(b"[")


def _utf8(body: bytes) -> bytes:
    """Return the body without a byte order mark. Raise HTTPException if its encoding is not UTF-8."""
    encoding = json.detect_encoding(body[:4])
    if not encoding.startswith("utf-8"):
        raise HTTPException(400, f"the body is encoded in {encoding.upper()}: JSON must be sent in UTF-8")
    return body.removeprefix(b"\xef\xbb\xbf")


def _token_items(value: Any) -> int:
    if not isinstance(value, dict):
        return 0
    lists = [given for name in TOKEN_FIELDS if isinstance(given := value.get(name), list) and given]
    # Documents of a ranking, which are no ids, are validated one by one.
    lists = [given for given in lists if given is not value.get("documents") or isinstance(given[0], int | list)]
    return sum(len(given) + sum(len(entry) for entry in given if isinstance(entry, list)) for given in lists)


def _parse_beginning(body: bytes) -> Any:
    try:
        return from_json(body[:HEAD_BYTES], allow_partial=True)
    except ValueError:
        return None


def _too_many(value: Any, count: int, limit: int) -> RequestError:
    """Return the error for a body with too many items, which names the field with the most items."""
    field, sizes = None, {}
    if isinstance(value, dict):
        sizes = {name: sum(1 for _ in _walk(entry)) for name, entry in value.items()}
        field = max(sizes, key=lambda name: sizes[name], default=None)
        if field is not None and sizes[field] < len(sizes):
            field = None
    where = "the body itself" if field is None else field[:100]
    message = (
        f"the body has {count} items (list entries, fields, objects), most of them in {where}: the limit is {limit}"
    )
    return RequestError(message, field=field, value=count, limit=limit)


def _walk(value: Any) -> Iterator[Any]:
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for entry in entries:
        yield entry
        yield from _walk(entry)
