"""Command-line options made from configurations, and the options of the commands that generate text."""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from jaxserve.core.config import EngineConfig
from jaxserve.core.options import Option, OptionField, check_ranges, help_of, options_of
from jaxserve.core.vllm_options import COMMAND_LINE, TERMINAL

Given = dict[str, Any]
"""Options given on the command line, by field of a configuration."""


@dataclass(frozen=True)
class OptionsOf:
    """A mark on a command's parameter that stands for the options of a configuration: all, or those in `only`."""

    kind: type
    only: Collection[str] | None = None

    def fields(self) -> list[OptionField]:
        """Return the options in the order of the configuration."""
        return [field for field in options_of(self.kind) if self.only is None or field.name in self.only]


IN_TERMINAL = frozenset(field.name for field in options_of(EngineConfig) if field.option.in_terminal)
OFFLINE = IN_TERMINAL | {"model", "kv_pages", "max_num_seqs", "max_num_batched_tokens"}


THE_MODELS = "the model's (its generation_config.json)"


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling options of `jaxserve generate`, which are fields of `SamplingParams`."""

    max_tokens: Annotated[int, Option("Sampling", "Maximum number of tokens to generate.", first=True)] = 128
    temperature: Annotated[
        float | None,
        Option("Sampling", "Sampling temperature; 0: always the likeliest token.", default=THE_MODELS, first=True),
    ] = None
    top_p: Annotated[
        float | None,
        Option(
            "Sampling",
            "Sample from the likeliest tokens that together have this probability.",
            default=THE_MODELS,
            first=True,
        ),
    ] = None
    top_k: Annotated[
        int | None, Option("Sampling", "Sample from this many of the likeliest tokens; 0: all.", default=THE_MODELS)
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Option("Sampling", "Penalty on tokens that already occurred; above 1: fewer repetitions.", default=THE_MODELS),
    ] = None
    seed: Annotated[int | None, Option("Sampling", "Random seed; the same seed gives the same answer.", first=True)] = (
        None
    )
    stop: Annotated[list[str] | None, Option("Sampling", "Text that ends the answer (repeatable).", first=True)] = None


@dataclass(frozen=True)
class ChatSamplingOptions(SamplingOptions):
    """Sampling options of `jaxserve chat`, whose answers may be longer."""

    max_tokens: Annotated[int, Option("Sampling", "Maximum number of tokens of an answer.", first=True)] = 512


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command for Typer, with each parameter that stands for a configuration replaced by its options.

    What the command receives depends on the annotation of such a parameter:

    - a dataclass of options: an instance of it;
    - `Annotated[kind, OptionsOf(kind, only=...)]`: an instance, of which only some fields are options;
    - `Annotated[Given, OptionsOf(kind)]`: a dict of the options that were given.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: marked for name, hint in hints.items() if (marked := _options_of(hint)) is not None}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            parameters += map(_parameter, groups[parameter.name].fields())
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name]))

    def expanded(**values: Any) -> None:
        for name, marked in groups.items():
            found = {field.name: values.pop(field.name) for field in marked.fields()}
            chosen = {field: value for field, value in found.items() if value is not None}
            only_given = get_origin(hints[name]) is Annotated and get_args(hints[name])[0] is Given
            values[name] = chosen if only_given else _build_checked(marked.kind, chosen)
        command(**values)

    expanded.__name__, expanded.__doc__ = command.__name__, command.__doc__
    options = [field for marked in groups.values() for field in marked.fields()]
    expanded.shown_later = {field.name for field in options if not field.option.first}  # type: ignore[attr-defined]
    # Options of other engines that the command explains; a command with the degree --tp has options of an engine.
    names = {field.name for field in options}
    others = TERMINAL if "max_tokens" in names else COMMAND_LINE
    expanded.others = others if "tp" in names else {}  # type: ignore[attr-defined]
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


MODEL = next(help_of(field) for field in options_of(EngineConfig) if field.name == "model")


def _options_of(hint: Any) -> OptionsOf | None:
    if get_origin(hint) is Annotated:
        return next((extra for extra in hint.__metadata__ if isinstance(extra, OptionsOf)), None)
    return OptionsOf(hint) if hasattr(hint, "__dataclass_fields__") else None


def _build_checked(kind: type, chosen: Given) -> Any:
    config = kind(**chosen)
    check_ranges(config)
    return config


def _parameter(field: OptionField) -> inspect.Parameter:
    """Return the command's parameter for an option. It is None if not given: the configuration holds the default."""
    kind = _typer_type(field)
    option = field.option
    limits = {"min": option.minimum, "max": option.maximum} if field.type in (int, float) else {}
    if field.type is int:
        limits = {name: None if limit is None else int(limit) for name, limit in limits.items()}
    shown = typer.Option(
        *(option.flags or _flags(field)),
        help=help_of(field),
        rich_help_panel=option.group,
        show_default=False,
        envvar=option.env,
        **limits,  # type: ignore[arg-type]
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, shown]
    )


def _typer_type(field: OptionField) -> Any:
    """Return an option's type for Typer: a list if it is repeatable, and `Path` where a string or a path is allowed."""
    if field.repeated:
        return list[get_args(field.type)[0]]  # type: ignore[misc]
    if field.is_json:
        return str
    if field.option.hub:  # as it was written: a path loses the "./" that tells it from a name
        return str
    return Path if Path in get_args(field.type) else field.type


def _flags(field: OptionField) -> tuple[str, ...]:
    return (f"{field.flag}/--no-{field.flag[2:]}",) if field.type is bool else (field.flag,)
