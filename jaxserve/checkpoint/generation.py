"""What generation_config.json says of sampling: the defaults of requests that say nothing."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.core.errors import RequestError
from jaxserve.core.sampling import SamplingParams

log = logging.getLogger(__name__)

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(generation: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the sampling parameters that a model's generation_config.json sets.

    With `"do_sample": false` the likeliest token is taken, as in Transformers. A value that no request could have is
    left out, which one line of the log tells.
    """
    defaults = {name: generation[name] for name in SAMPLING_DEFAULTS if _valid(name, generation, directory)}
    return defaults | {"temperature": 0.0} if generation.get("do_sample") is False else defaults


def default_max_new_tokens(generation: Mapping[str, Any], directory: Path) -> int | None:
    """Return `max_new_tokens`, the most tokens of any answer, as in vLLM; None where there is none."""
    value = {"max_tokens": generation.get("max_new_tokens")}
    return value["max_tokens"] if _valid("max_tokens", value, directory, "max_new_tokens") else None


def _valid(name: str, values: Mapping[str, Any], directory: Path, shown: str | None = None) -> bool:
    value = values.get(name)
    if value is None:
        return False
    try:
        SamplingParams(**{name: value})
    except RequestError as error:
        log.warning(
            "%s: %s is %r, it must be %s: it is ignored",
            directory / "generation_config.json",
            shown or name,
            value,
            error.limit,
        )
        return False
    return True
