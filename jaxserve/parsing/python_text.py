"""Values that models write as Python or JSON, as JSON."""

import json
import math
import re
import unicodedata
from typing import NoReturn

SPACE = " \t\n\r\f"  # the white space of Python; others, such as a no-break space, belong to a text
TOKEN = re.compile(
    r"""(?P<string>'''(?:[^\\]|\\.)*?'''|\"""(?:[^\\]|\\.)*?\"""|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    r"""|(?P<number>[+-]?(?:0[xXoObB][0-9a-fA-F_]+|"""
    r"""(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][+-]?[0-9][0-9_]*)?))"""
    r"""|(?P<name>[A-Za-z]+)|(?P<mark>[][(){},:])|(?P<space>[ \t\n\r\f]+)""",
    re.DOTALL,
)
LINE_BREAK = re.compile(r"(?<!\\)(?:\\\\)*[\n\r]")
NAMES = {"True": "true", "False": "false", "None": "null"}
JSON_NAMES = ("true", "false", "null")
JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^{}]*\}|[0-7]{1,3}|.)", re.DOTALL)
ESCAPES = {"\n": "", "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def to_json(text: str, *, exact: bool = False, code: bool = False) -> str | None:
    """Return a literal of JSON or Python as JSON, None if the text as a whole is neither.

    What is JSON already stays as it is. `exact`: the text may also be meant as a string, so that only what JSON itself
    writes is a number (`+49`, `1_0` and `(030)` are not), and only what Python writes is a literal of Python. Without
    it, Python's other numbers are read, too, and JSON's names beside those of Python (`{'a': true}`), and strings may
    have line breaks, as they may in `code`.
    """
    text = text.strip(SPACE)
    if is_json(text):
        return text
    translation = _Translation(exact, one_line=exact and not code)
    at = 0
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None or not translation.add(found.group(), found.lastgroup or ""):
            return None
        at = found.end()
    result = "".join(translation.pieces).strip(SPACE)
    return result if is_json(result) else None


def is_json(text: str) -> bool:
    """Return whether a text is JSON that clients can read and write again: not NaN, 1e400 or 5,000 digits."""
    try:
        json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return False
    return True


class _Translation:
    """The JSON for the tokens of a literal, in which each value stands where one may come.

    That objects consist of keys and values is not looked at here: what has none is no JSON.
    """

    def __init__(self, exact: bool, *, one_line: bool) -> None:
        self.pieces: list[str] = []
        self._exact, self._one_line = exact, one_line
        self._last = -1  # the last piece that is not white space
        self._open: list[tuple[str, int]] = []  # brackets that are open, and their pieces
        self._tuples: set[int] = set()  # the round ones of them in which there is a comma

    def add(self, token: str, kind: str) -> bool:
        """Add the JSON for a token, and return False if it cannot come next."""
        if kind == "space":
            self.pieces.append(token)
            return True
        last = self.pieces[self._last] if self._last >= 0 else ""
        begins = last in ("", "[", "{", ",", ":")  # two values side by side are none
        piece: str | None = None
        if kind == "mark":
            piece = self._mark(token, last, begins)
        elif begins:
            piece = self._scalar(token, kind)
        if piece is None:
            return False
        self._last = len(self.pieces)
        self.pieces.append(piece)
        return True

    def _scalar(self, token: str, kind: str) -> str | None:
        if kind == "string":
            return None if self._one_line and _is_broken(token) else _string(token)
        if kind == "number":
            return _number(token, self._exact)
        return token if token in JSON_NAMES and not self._exact else NAMES.get(token)

    def _mark(self, token: str, last: str, begins: bool) -> str | None:
        """Return a bracket, comma or colon as JSON, in which tuples are arrays and no comma ends an array."""
        if token in ("(", "[", "{"):
            self._open.append((token, len(self.pieces)))
            return {"(": "["}.get(token, token) if begins else None
        bracket, begin = self._open[-1] if self._open else ("", 0)
        if token == ",":
            self._tuples.add(begin)
            return None if begins or not bracket else token
        if token == ":":
            return token if bracket == "{" else None
        if bracket + token not in ("()", "[]", "{}"):
            return None
        self._open.pop()
        if last == ",":
            self.pieces[self._last] = " "
        elif token == ")" and begin not in self._tuples and self._last > begin:
            self.pieces[begin] = " "  # only grouping
            return None if self._exact else " "
        return {")": "]"}.get(token, token)


def _string(token: str) -> str | None:
    """Return a string of Python as JSON, None if an escape in it is broken. It may have line breaks."""
    quotes = 3 if len(token) >= 6 and token[:3] in ("'''", '"""') else 1
    try:
        return json.dumps(ESCAPE.sub(_escaped, token[quotes:-quotes]), ensure_ascii=False)
    except (ValueError, KeyError, OverflowError):
        return None


def _is_broken(token: str) -> bool:
    """Return whether a string has a line break that Python does not allow in it."""
    return not token.startswith(("'''", '"""')) and bool(LINE_BREAK.search(token))


def _escaped(found: re.Match[str]) -> str:
    """Return the character that an escape stands for. Python keeps the backslash of those that it does not know."""
    escape = found.group(1)
    if escape[0] in "xuU":
        return chr(int(escape[1:], 16))
    if escape[0] == "N":
        character = unicodedata.lookup(escape[2:-1])
        if len(character) > 1:
            raise KeyError(escape)  # a name of several characters, which escapes do not know
        return character
    if escape[0] in "01234567":
        return chr(int(escape, 8))
    return ESCAPES.get(escape, escape if escape in "\\'\"" else found.group())


def _number(token: str, exact: bool) -> str | None:
    """Return a number of JSON as it is, and unless the literal must be `exact`, one of Python as JSON."""
    if JSON_NUMBER.fullmatch(token):
        return token
    if exact:
        return None
    try:
        return repr(int(token, 0))
    except ValueError:
        pass
    try:
        return repr(float(token)) if re.search("[.eE]", token) else None
    except ValueError:
        return None


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
