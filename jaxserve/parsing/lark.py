"""Expressions of Lark, in llguidance's form, for texts."""

import json
import re
from collections.abc import Iterable, Mapping


def literal(text: str, special: Mapping[str, int]) -> str:
    """Return a text as an expression of Lark, in which special tokens are named by their ids."""
    if not text:
        return ""
    names = sorted((name for name in special if name in text), key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)


def one_of(texts: Iterable[str]) -> str:
    """Return an expression of Lark for one of several texts: one terminal, as a parser tries all rules at once."""
    return "/(" + "|".join(map(_escaped, texts)) + ")/"


def _escaped(text: str) -> str:
    """Return a regular expression of Lark for a text."""
    return re.sub(r"[^\w ]", lambda found: f"\\u{{{ord(found[0]):x}}}", text)
