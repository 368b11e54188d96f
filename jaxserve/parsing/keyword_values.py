"""Values of the keywords of JSON schemas: which of them a grammar can be made of."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
# Look-around, bounds of words and references back, which no grammar has.
LOOK_AROUND = re.compile(r"\(\?<?[=!]|(?<!\\)(\\\\)*\\[bB1-9]")
MALFORMED = object()


def is_number(value: Any) -> bool:
    """Return whether a value is a number of JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    """Return whether a value can be written as JSON."""
    match value:
        case float():
            return math.isfinite(value)
        case list():
            return all(map(_is_finite, value))
        case dict():
            return all(map(_is_finite, value.values()))
    return True


def _type(value: Any) -> Any:
    kinds = value if isinstance(value, list) else [value]
    return value if kinds and all(isinstance(kind, str) and kind in TYPES for kind in kinds) else MALFORMED


def _enum(value: Any) -> Any:
    values = [each for each in value if _is_finite(each)] if isinstance(value, list) else []
    return values or MALFORMED


def required_names(value: Any) -> Any:
    """Return the names that `required` lists, `MALFORMED` if it is no list of names."""
    if not isinstance(value, list):
        return MALFORMED
    return value if all(isinstance(name, str) for name in value) else MALFORMED


def _count(value: Any) -> Any:
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    return number if isinstance(number, int) and not isinstance(number, bool) and number >= 0 else MALFORMED


def _bound(value: Any) -> Any:
    return value if isinstance(value, bool) or (is_number(value) and not math.isnan(value)) else MALFORMED


def _step(value: Any) -> Any:
    return value if is_number(value) and math.isfinite(value) and value > 0 else MALFORMED


def _pattern(value: Any) -> Any:
    return value if isinstance(value, str) and not LOOK_AROUND.search(value) else MALFORMED


# Functions that return the value of a keyword as it is used, `MALFORMED` if it cannot be.
VALUES: Mapping[str, Callable[[Any], Any]] = {
    "type": _type,
    "enum": _enum,
    "const": lambda value: value if _is_finite(value) else MALFORMED,
    "required": required_names,
    "pattern": _pattern,
    "multipleOf": _step,
    "format": lambda value: MALFORMED,  # no string
    **dict.fromkeys(COUNTS, _count),
    **dict.fromkeys((*LOWER, *UPPER), _bound),
}
