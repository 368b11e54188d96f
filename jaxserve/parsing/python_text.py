"""Values that models write as Python or JSON, as JSON."""

import json
import re

TOKEN = re.compile(
    r"""(?P<string>'''(?:[^\\]|\\.)*?'''|\"""(?:[^\\]|\\.)*?\"""|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    r"""|(?P<number>[+-]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"""
    r"""|(?P<name>[A-Za-z]+)|(?P<mark>[][(){},:])|(?P<space>\s+)""",
    re.DOTALL,
)
NAMES = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
ESCAPES = {"\n": "", "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def to_json(text: str) -> str | None:
    """Return a literal of Python or JSON as JSON, None if it is neither. What is JSON already stays as it is."""
    translation = _Translation()
    at = 0
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None or not translation.add(found.group(), found.lastgroup or ""):
            return None
        at = found.end()
    result = "".join(translation.pieces)
    try:
        json.loads(result)
    except (ValueError, RecursionError):
        return None
    return result


class _Translation:
    """The JSON for the tokens of a literal. It is JSON only if they are a literal, which is not checked here."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._last = -1  # the last piece that is not white space
        self._open: list[tuple[str, int]] = []  # brackets that are open, and their pieces
        self._tuples: set[int] = set()  # the round ones of them in which there is a comma

    def add(self, token: str, kind: str) -> bool:
        """Add the JSON for a token, and return False if JSON has nothing like it."""
        piece: str | None = token
        if kind == "string":
            piece = _string(token)
        elif kind == "number":
            piece = _number(token)
        elif kind == "name":
            piece = NAMES.get(token)
        elif kind == "mark":
            piece = self._mark(token)
        if piece is None:
            return False
        if kind != "space":
            self._last = len(self.pieces)
        self.pieces.append(piece)
        return True

    def _mark(self, token: str) -> str | None:
        """Return a bracket, comma or colon as JSON, in which tuples are arrays and no comma ends an array."""
        last = self.pieces[self._last] if self._last >= 0 else ""
        if token in ("(", "[", "{"):
            self._open.append((token, len(self.pieces)))
        elif token == "," and self._open:
            self._tuples.add(self._open[-1][1])
            return None if last in ("", "[", "{", ",", ":") else token
        elif token in (")", "]", "}"):
            bracket, begin = self._open.pop() if self._open else ("", 0)
            if bracket + token not in ("()", "[]", "{}"):
                return None
            if last == ",":
                self.pieces[self._last] = " "
            elif token == ")" and begin not in self._tuples and self._last > begin:
                self.pieces[begin] = " "  # only grouping
                return " "
        return {"(": "[", ")": "]"}.get(token, token)


def _string(token: str) -> str:
    """Return a string as JSON. One in double quotes is read as JSON if it can be, otherwise as Python reads it."""
    if token[0] == '"' and not token.startswith('"""'):
        try:
            json.loads(token)
            return token
        except ValueError:
            pass
    quotes = 3 if len(token) >= 6 and token[:3] in ("'''", '"""') else 1
    return json.dumps(ESCAPE.sub(_escaped, token[quotes:-quotes]), ensure_ascii=False)


def _escaped(found: re.Match[str]) -> str:
    """Return the character that an escape stands for. Python keeps the backslash of those that it does not know."""
    escape = found.group(1)
    try:
        if escape[0] in "xuU" and len(escape) > 1:
            return chr(int(escape[1:], 16))
        if escape[0] in "01234567":
            return chr(int(escape, 8))
    except (ValueError, OverflowError):
        return found.group()
    return ESCAPES.get(escape, escape if escape in "\\'\"" else found.group())


def _number(token: str) -> str | None:
    if JSON_NUMBER.fullmatch(token):
        return token
    try:
        return str(int(token)) if token.strip("+-").replace("_", "").isdigit() else repr(float(token))
    except ValueError:
        return None
