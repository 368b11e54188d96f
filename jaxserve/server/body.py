"""From the bytes of a JSON body to Python values, in time that no client can stretch.

What a body costs is the number of its items (list entries, fields, objects), far more than its bytes. So they are
counted first, without parsing, and only as many are parsed and validated as a request can need: a bounded number, and
beside them the entries of the fields that hold prompts, of which there may be as many as the queue takes tokens.
"""

import json
import zlib
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json
from starlette.exceptions import HTTPException

from jaxserve.core.errors import RequestError

MAX_ITEMS = 50_000  # outside of the fields below; a chat message, or one of its parts, takes three or four
PROMPT_FIELDS = ("prompt", "input", "tokens")
ENCODINGS = frozenset({"gzip", "x-gzip", "deflate"})
MAX_DIGITS = 400  # a float has at most 309 before its point
DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
HEAD = 64 * 1024  # bytes that are parsed to name the field of a body that is too large to parse


def parse_body(body: bytes, max_prompt_items: int) -> Any:
    """Return the value of a strict JSON body: UTF-8, no NaN, no lone surrogates, bounded nesting.

    Raises HTTPException for a body that is not JSON, RequestError for one of too many items.
    """
    body = _utf8(body)
    limit = MAX_ITEMS + max_prompt_items
    if (count := count_items(body, limit)) > limit:
        raise _too_many(_head(body), count, limit)
    value = strict_json(body)
    if count > MAX_ITEMS and (others := count - _prompt_items(value)) > MAX_ITEMS:
        raise _too_many(value, others, MAX_ITEMS)
    return value


def strict_json(body: bytes) -> Any:
    """Return the value of JSON text. Raises HTTPException unless it is JSON by the letter of its standard."""
    try:
        return from_json(_utf8(body), allow_inf_nan=False)
    except ValueError as error:
        raise HTTPException(400, f"the body is not valid JSON: {error}") from error


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Return a compressed body as it was. Raises HTTPException for more than `limit` bytes, or for what is damaged."""
    raw = encoding == "deflate" and body[0] & 0x0F != 8  # without zlib's header, as some clients send it
    decompressor = zlib.decompressobj(-zlib.MAX_WBITS if raw else zlib.MAX_WBITS | 32)  # 32: of either header
    try:
        whole = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        raise HTTPException(400, f"the body is not valid {encoding} (header content-encoding): {error}") from error
    if len(whole) > limit:
        raise body_too_large(limit)
    if not decompressor.eof or decompressor.unused_data:
        state = "has more after its end" if decompressor.eof else "is cut off"
        raise HTTPException(400, f"the body is {encoding} (header content-encoding) that {state}")
    return whole


def body_too_large(limit: int, headers: dict[str, str] | None = None) -> HTTPException:
    """Return the error for a body of more than `limit` bytes."""
    return HTTPException(413, f"the body is larger than {limit} bytes (--max-body-mb)", headers)


def count_items(body: bytes, limit: int) -> int:
    """Return how many items a JSON text has, or some number above the limit if there are more.

    Lists and objects count as one more than their entries. Every step is a pass in C over the text, and the one that
    makes a list of strings comes after their number is known to be bounded. Raises HTTPException for a number of very
    many digits, whose value would take time that grows with their square.
    """
    if (count := _structure(body)) <= MAX_ITEMS and len(body) <= HEAD:  # also counts what stands in strings
        return count
    body = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # now every quote begins or ends a string
    if (fields := body.count(b'"') // 4) > limit:
        return fields
    outside = b"".join(body.split(b'"')[::2])
    if b"0" * (MAX_DIGITS + 1) in outside.translate(DIGITS_TO_ZERO):
        raise HTTPException(400, f"the body has a number of more than {MAX_DIGITS} digits")
    return _structure(outside)


def _structure(text: bytes) -> int:
    return text.count(b",") + text.count(b"{") + text.count(b"[")


def _utf8(body: bytes) -> bytes:
    """Return the body without a byte order mark. Raises HTTPException for other encodings than UTF-8."""
    encoding = json.detect_encoding(body[:4])
    if not encoding.startswith("utf-8"):
        raise HTTPException(400, f"the body is in {encoding.upper()}, JSON must be sent in UTF-8")
    return body.removeprefix(b"\xef\xbb\xbf")


def _prompt_items(value: Any) -> int:
    """Return how many items the fields that hold prompts have."""
    if not isinstance(value, dict):
        return 0
    lists = [value[name] for name in PROMPT_FIELDS if isinstance(value.get(name), list)]
    return sum(len(given) + sum(len(entry) for entry in given if isinstance(entry, list)) for given in lists)


def _head(body: bytes) -> Any:
    """Return what the beginning of a body holds, or None."""
    try:
        return from_json(body[:HEAD], allow_partial=True)
    except ValueError:
        return None


def _too_many(value: Any, count: int, limit: int) -> RequestError:
    """Return the error for a body of too many items, with the field that has the most of them."""
    field, sizes = None, {}
    if isinstance(value, dict):
        sizes = {name: sum(1 for _ in _walk(entry)) for name, entry in value.items()}
        field = max(sizes, key=lambda name: sizes[name], default=None)
        if field is not None and sizes[field] < len(sizes):
            field = None
    where = "the body itself" if field is None else field[:100]
    message = (
        f"the body has {count} items (list entries, fields, objects), most of them in {where}; the limit is {limit}"
    )
    return RequestError(message, field=field, value=count, limit=limit)


def _walk(value: Any) -> Iterator[Any]:
    """Yield everything inside a value."""
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for entry in entries:
        yield entry
        yield from _walk(entry)
