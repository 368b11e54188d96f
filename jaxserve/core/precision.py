"""Precisions of weights: their names, and which layer of a model has which."""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby

from jaxserve.core.errors import ConfigError

BITS: Mapping[str, int] = {"int8": 8, "int4": 4, "int3": 3}
"""Quantised precisions and the bits of a weight in them."""

FULL: Mapping[str, str] = {
    "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16", "float32": "float32",
    "fp32": "float32",
}  # fmt: skip
"""Names of the full precisions."""

AUTO = "auto"  # what the checkpoint has; the model's dtype, unless it was quantised by others


def parse_precision(name: str, dtype: str, option: str = "precision") -> str:
    """The precision that a user's name stands for in a model of this dtype. Raises `ConfigError` naming `option`."""
    precision = dtype if name == AUTO else FULL.get(name, name)
    if precision in FULL and precision != dtype:
        raise ConfigError(f"{option} is {name!r}, but full precision is {dtype} here (dtype)")
    if precision not in FULL and precision not in BITS:
        raise ConfigError(f"{option} is {name!r}; there are {', '.join((AUTO, dtype, *BITS))}")
    return precision


def parse_layers(text: str, num_layers: int, dtype: str) -> dict[int, str]:
    """The precision of each layer that a text such as "0-3:bf16,4-:int4" names. A range has both its ends.

    Raises `ConfigError` for what is no range of precisions, and for layers that are named twice or do not exist.
    """
    precisions: dict[int, str] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(-(\d*))?:(\w+)", part.strip())
        if match is None:
            raise ConfigError(f"layer_precision has {part.strip()!r}; it is ranges as in '0-3:bf16,4-:int4'")
        first = int(match[1])
        last = first if match[2] is None else int(match[3] or num_layers - 1)
        if not first <= last < num_layers:
            raise ConfigError(
                f"layer_precision has {part.strip()!r}, the model's {num_layers} layers are 0-{num_layers - 1}"
            )
        precision = parse_precision(match[4], dtype, "layer_precision")
        for layer in range(first, last + 1):
            if layer in precisions:
                raise ConfigError(f"layer_precision names layer {layer} twice: {text!r}")
            precisions[layer] = precision
    return precisions


def layer_precisions(precision: str, layer_precision: str | None, stored: Sequence[str], dtype: str) -> tuple[str, ...]:
    """The precision of every decoder layer: `precision`, but where `layer_precision` says otherwise.

    `stored`: what each layer has in the checkpoint, which is what "auto" means. Raises `ConfigError`.
    """
    default = None if precision == AUTO else parse_precision(precision, dtype)
    given = parse_layers(layer_precision, len(stored), dtype) if layer_precision is not None else {}
    return tuple(given.get(layer, default or own) for layer, own in enumerate(stored))


def head_precision(name: str, precision: str, dtype: str) -> str:
    """The precision of the head: the one named; "auto" is int8 where the layers' option is quantised.

    Few bits change the logits themselves, so that no less than 8 are taken unasked. Raises `ConfigError`.
    """
    if name != AUTO:
        return parse_precision(name, dtype, "head_precision")
    return "int8" if precision in BITS else dtype


def assignment_id(precisions: Sequence[str]) -> str:
    """The precisions of all layers as `parse_layers` reads them."""
    parts, first = [], 0
    for precision, run in groupby(precisions):
        last = first + len(list(run)) - 1
        parts.append(f"{first}-{last}:{precision}")
        first = last + 1
    return ",".join(parts)
