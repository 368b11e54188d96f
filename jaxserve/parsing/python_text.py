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
    pieces: list[str] = []
    at = 0
    brackets: list[str] = []
    while at < len(text):
        found = TOKEN.match(text, at)
        piece = _piece(found, pieces, brackets) if found else None
        if found is None or piece is None:
            return None
        pieces.append(piece)
        at = found.end()
    result = "".join(pieces)
    try:
        json.loads(result)
    except (ValueError, RecursionError):
        return None
    return result


def _piece(found: re.Match[str], pieces: list[str], brackets: list[str]) -> str | None:
    """Return a token as JSON, None if JSON has nothing like it. Drops commas before a closing bracket."""
    token = found.group()
    if found.lastgroup == "string":
        return _string(token)
    if found.lastgroup == "number":
        return _number(token)
    if found.lastgroup == "name":
        return NAMES.get(token)
    if token in ("(", "[", "{"):
        brackets.append(token)
    elif token in (")", "]", "}"):
        comma = next((i for i in reversed(range(len(pieces))) if not pieces[i].isspace()), None)
        if not brackets or brackets.pop() + token not in ("()", "[]", "{}") or comma is None:
            return None
        if pieces[comma] == ",":
            pieces[comma] = " "
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
