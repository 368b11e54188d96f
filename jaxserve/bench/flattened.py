"""How a group of options becomes part of a command."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, get_type_hints


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """The same command for Typer, taking the fields of its parameters' dataclasses as options of their own."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if name != "return" and hasattr(kind, "__dataclass_fields__")}
    parameters = [p for p in inspect.signature(command).parameters.values() if p.name not in groups]
    for kind in groups.values():
        types = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            parameters.append(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[field.name]
                )
            )

    def flat(**values: Any) -> None:
        made = {name: kind(**{f.name: values.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        command(**values, **made)

    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {p.name: p.annotation for p in parameters}
    return flat
