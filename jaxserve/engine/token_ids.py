"""Token ids as users write them: in any sequence, or as an array of NumPy, JAX or PyTorch."""

from collections.abc import Mapping, Set
from operator import index
from typing import Any

from jaxserve.core.plain_values import plain


def as_token_ids(value: Any) -> tuple[int, ...]:
    """Return token ids as a tuple of Python's integers. Raise `TypeError` for anything that is not a series of them."""
    if isinstance(value, str | bytes | bytearray | Mapping | Set):
        raise TypeError(f"a {type(value).__name__} is no list")
    tokens = tuple(plain(value))
    if bool in set(map(type, tokens)):
        raise TypeError("True and False are not token ids, although they are integers in Python")
    return tuple(map(index, tokens))
