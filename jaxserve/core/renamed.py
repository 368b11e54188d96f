"""Old names of public attributes, which still work but warn."""

import warnings
from typing import Any


class Renamed:
    """A deprecated attribute: reading it warns and returns the attribute that replaced it."""

    def __init__(self, new: str):
        """`new` is the name of the attribute that replaced this one."""
        self._new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        warnings.warn(f"{owner.__name__}.{self._old} is deprecated: use {self._new}", DeprecationWarning, stacklevel=2)
        return getattr(instance, self._new)
