"""The sampling parameters of requests that give none: those of a generation_config.json, changed by an option."""

import difflib
from collections.abc import Mapping
from typing import Any

from jaxserve.core.errors import ConfigError, RequestError
from jaxserve.core.options import JsonObject, json_object
from jaxserve.core.sampling import SamplingParams

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
MAX_NEW_TOKENS = "max_new_tokens"  # the name of the limit on every answer
OVERRIDE = "override_generation_config"
FLAG = "--override-generation-config"


def overrides(value: JsonObject | None) -> dict[str, Any]:
    """Return the values of the option `override_generation_config`, {} for None.

    Raise `ConfigError`, naming the option, if one has an unknown name or is not allowed. A value of None stands for the
    fixed default of `SamplingParams`.
    """
    given = {} if value is None else json_object(value, FLAG)
    for name, entry in given.items():
        known = (*SAMPLING_DEFAULTS, MAX_NEW_TOKENS)
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"choose from {', '.join(known)}"
            raise ConfigError(f"{OVERRIDE} has the key {name[:40]!r}: {hint} ({FLAG})")
        if entry is None:
            continue
        if limit := _broken_limit(name, entry):
            raise ConfigError(f"{OVERRIDE} has {name} {entry!r}: it must be {limit} ({FLAG})")
    return given


def _broken_limit(name: str, value: Any) -> str:
    """Return what a value must be, "" if it is allowed."""
    if name == MAX_NEW_TOKENS:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return "" if whole and value >= 1 else "an integer of at least 1"
    try:
        SamplingParams(**{name: value})
    except RequestError as error:
        return str(error.limit)
    return ""


def overridden(defaults: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return default parameters with the changes of the option. A change to None removes a default."""
    chosen = {**defaults, **{name: value for name, value in changes.items() if name in SAMPLING_DEFAULTS}}
    return {name: value for name, value in chosen.items() if value is not None}
