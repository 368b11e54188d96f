"""How a group of options becomes part of a command."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, get_type_hints


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """The same command for Typer, in which the fields of a parameter that is a dataclass stand in its place."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if name != "return" and hasattr(kind, "__dataclass_fields__")}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            parameters += _options(groups[parameter.name])
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name]))

    def flat(**values: Any) -> None:
        made = {name: kind(**{f.name: values.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        command(**values, **made)

    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {p.name: p.annotation for p in parameters}
    return flat


def _options(kind: type) -> list[inspect.Parameter]:
    """A parameter for each field of a dataclass."""
    types = get_type_hints(kind, include_extras=True)
    found = []
    for field in fields(kind):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        found.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[field.name])
        )
    return found
