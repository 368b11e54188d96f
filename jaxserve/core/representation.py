"""Short representations of values for interactive use: what differs from the defaults, and no long contents."""

from dataclasses import MISSING, fields
from typing import Any

MAX_TEXT = 60  # characters of a text
MAX_VALUE = 200  # characters of another value
MAX_ENTRIES = 8  # of a list


def short_repr(value: Any) -> str:
    """Return a dataclass as `Name(field=value, ...)` with the fields that differ from their defaults."""
    shown = []
    for field in fields(value):
        if field.repr:
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            given = getattr(value, field.name)
            if default is MISSING or type(given) is not type(default) or given != default:
                shown.append(f"{field.name}={shortened(given)}")
    return f"{type(value).__name__}({', '.join(shown)})"


def shortened(value: Any) -> str:
    """Return a value as Python writes it, or what it consists of if that is long."""
    if isinstance(value, str):
        return repr(value) if len(value) <= MAX_TEXT else f"{value[: MAX_TEXT - 3]!r}..."
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"<{value.dtype}{list(value.shape)}>"
    if isinstance(value, tuple | list) and len(value) > MAX_ENTRIES:
        return f"<{len(value)} entries>"
    if isinstance(value, tuple | list):
        entries = ", ".join(map(shortened, value))
        return f"[{entries}]" if isinstance(value, list) else f"({entries}{',' if len(value) == 1 else ''})"
    text = repr(value)
    return text if len(text) <= MAX_VALUE or hasattr(value, "__dataclass_fields__") else f"{text[: MAX_VALUE - 3]}..."
