"""Precisions of weights: their names, and the options that assign them to the layers of a model."""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby

from jaxserve.core.errors import ConfigError

BITS: Mapping[str, int] = {"int8": 8, "int4": 4, "int3": 3}
"""Bits of a weight in each quantised precision."""

FULL: Mapping[str, str] = {
    "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16", "float32": "float32",
    "fp32": "float32",
}  # fmt: skip
"""Names of the full precisions, abbreviations included, and the dtype that each means."""

AUTO = "auto"  # the checkpoint's precision: the model's dtype, unless the checkpoint is quantised


def parse_precision(name: str, dtype: str, option: str = "precision") -> str:
    """Return the precision that a user's name means in a model with this dtype.

    Raise `ConfigError` that names `option` if the name is unknown or is another full precision than `dtype`.
    """
    precision = dtype if name == AUTO else FULL.get(name, name)
    if precision in FULL and precision != dtype:
        raise ConfigError(f"{option} is {name!r}: full precision is {dtype} here (dtype)")
    if precision not in FULL and precision not in BITS:
        raise ConfigError(f"{option} is {name!r}: choose from {', '.join((AUTO, dtype, *BITS))}")
    return precision


def parse_layers(text: str, num_layers: int, dtype: str) -> dict[int, str]:
    """Return the precision of each layer that a text such as "0-3:bf16,4-:int4" names. Ranges include both ends.

    Raise `ConfigError` if the text has another form, or names a layer twice or one that does not exist.
    """
    precisions: dict[int, str] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(-(\d*))?:(\w+)", part.strip())
        if match is None:
            raise ConfigError(f"layer_precision has {part.strip()!r}: it must be ranges as in '0-3:bf16,4-:int4'")
        first = int(match[1])
        last = first if match[2] is None else int(match[3] or num_layers - 1)
        if not first <= last < num_layers:
            raise ConfigError(
                f"layer_precision has {part.strip()!r}: the model's {num_layers} layers are 0-{num_layers - 1}"
            )
        precision = parse_precision(match[4], dtype, "layer_precision")
        for layer in range(first, last + 1):
            if layer in precisions:
                raise ConfigError(f"layer_precision names layer {layer} twice: {text!r}")
            precisions[layer] = precision
    return precisions


def layer_precisions(precision: str, layer_precision: str | None, stored: Sequence[str], dtype: str) -> tuple[str, ...]:
    """Return the precision of every decoder layer: `precision`, except for layers that `layer_precision` names.

    `stored` is the precision of each layer in the checkpoint, which "auto" means. Raise `ConfigError` if an option is
    not valid.
    """
    default = None if precision == AUTO else parse_precision(precision, dtype)
    given = parse_layers(layer_precision, len(stored), dtype) if layer_precision is not None else {}
    return tuple(given.get(layer, default or own) for layer, own in enumerate(stored))


def head_precision(name: str, precision: str, dtype: str) -> str:
    """Return the precision of the output head: `name`, where "auto" means int8 if the layers' `precision` is quantised.

    "auto" never means fewer than 8 bits, because errors in the head change the logits directly. Raise `ConfigError`
    if `name` is unknown.
    """
    if name != AUTO:
        return parse_precision(name, dtype, "head_precision")
    return "int8" if precision in BITS else dtype


def assignment_id(precisions: Sequence[str]) -> str:
    """Return a text that names the precisions of all layers, e.g. "0-3:bfloat16,4-15:int4"; `parse_layers` reads it."""
    parts, first = [], 0
    for precision, run in groupby(precisions):
        last = first + len(list(run)) - 1
        parts.append(f"{first}-{last}:{precision}")
        first = last + 1
    return ",".join(parts)
