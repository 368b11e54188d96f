"""Python's own numbers, texts and lists in place of the scalars and arrays of NumPy, JAX and PyTorch."""

from collections.abc import Mapping
from types import NoneType
from typing import Any

PLAIN = frozenset({bool, int, float, str, NoneType})


def plain(value: Any) -> Any:
    """Return a value with Python's own numbers, texts and lists in place of those of array libraries.

    Lists, tuples and mappings are searched one level deep. All else stays as it is.
    """
    if type(value) in PLAIN:
        return value
    if hasattr(value, "tolist") and not isinstance(value, type):
        return value.tolist()
    if isinstance(value, list | tuple) and not PLAIN.issuperset(map(type, value)):
        return type(value)(map(_plain_entry, value)) if type(value) in (list, tuple) else value
    if isinstance(value, Mapping) and not PLAIN.issuperset(map(type, (*value, *value.values()))):
        return {_plain_entry(name): _plain_entry(entry) for name, entry in value.items()}
    return value


def make_plain(options: Any) -> None:
    """Make the values of a new frozen dataclass plain. To be called in its `__post_init__`."""
    for name, given in tuple(vars(options).items()):
        if type(given) not in PLAIN and (value := plain(given)) is not given:
            object.__setattr__(options, name, value)


def _plain_entry(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
