"""The parsers by name, as in vLLM, and which of them a chat template needs."""

from collections.abc import Mapping
from typing import TypeVar

from jaxserve.core.errors import ConfigError
from jaxserve.parsing.formats.base import ToolFormat
from jaxserve.parsing.formats.hermes import Hermes
from jaxserve.parsing.reasoning import ReasoningFormat

T = TypeVar("T")
AUTO, NONE = "auto", "none"

TOOL_PARSERS: Mapping[str, ToolFormat] = {form.name: form for form in (Hermes(),)}

REASONING_PARSERS: Mapping[str, ReasoningFormat] = {
    form.name: form
    for form in (
        ReasoningFormat("qwen3"),
        ReasoningFormat("deepseek_r1", always=True),
    )
}


def tool_format(name: str, template: str = "") -> ToolFormat | None:
    """Return the format `name`, or for "auto" that of a chat template; None if it shows none, and for "none".

    Raise ConfigError for an unknown name.
    """
    if name == AUTO:
        return TOOL_PARSERS["hermes"] if "<tool_call>" in template else None
    return _named(name, TOOL_PARSERS, "tool parser", "--tool-parser")


def reasoning_format(name: str, template: str = "") -> ReasoningFormat | None:
    """Return the format `name`, or for "auto" that of a chat template; None if it shows none, and for "none".

    Raise ConfigError for an unknown name.
    """
    if name == AUTO:
        return REASONING_PARSERS["qwen3"] if "</think>" in template else None
    return _named(name, REASONING_PARSERS, "reasoning parser", "--reasoning-parser")


def _named(name: str, known: Mapping[str, T], kind: str, flag: str) -> T | None:
    if name == NONE:
        return None
    if name in known:
        return known[name]
    raise ConfigError(f"unknown {kind} {name!r}: choose from {', '.join([AUTO, NONE, *sorted(known)])} ({flag})")
