"""From a model in full precision to its layers in fewer bits, one layer at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from jaxserve.calibration.activations import calibrate
from jaxserve.calibration.awq import awq_layer
from jaxserve.calibration.gptq import gptq_layer
from jaxserve.checkpoint.loader import Checkpoint
from jaxserve.checkpoint.mapping import numpy_dtype
from jaxserve.core.block_names import layer_name
from jaxserve.core.errors import ConfigError
from jaxserve.quantization.layer import Leaves, bits_of, round_layer
from jaxserve.quantization.rounding import GROUP, GROUPS

Method = Literal["rtn", "awq", "gptq"]
METHODS = get_args(Method)


@dataclass(frozen=True)
class Settings:
    """What to make. `group`: inputs that share a scale, 0 for all of an output's; `symmetric`: no zero points."""

    precisions: tuple[str, ...]
    method: Method = "awq"
    group: int = GROUP
    symmetric: bool = True

    def __post_init__(self):
        if not self.precisions:
            raise ConfigError("no precision is given to quantize to")
        for precision in self.precisions:
            bits_of(precision)
        if self.method not in METHODS:
            raise ConfigError(f"method {self.method!r} is unknown; known: {', '.join(METHODS)}")
        if self.group not in (0, *GROUPS):
            groups = ", ".join(map(str, sorted(GROUPS)))
            raise ConfigError(f"groups of {self.group} inputs are not supported; supported: {groups}, 0 for all inputs")

    def check(self, *, calibrated: bool) -> None:
        """Raises `ConfigError` if the method needs calibration text and there is none."""
        if self.method != "rtn" and not calibrated:
            raise ConfigError(f"method {self.method!r} needs calibration text (--calib FILE); only rtn does without")


class Variant(NamedTuple):
    """A layer in one of the precisions asked for."""

    index: int
    precision: str
    leaves: Leaves


def quantize_layers(checkpoint: Checkpoint, settings: Settings, tokens: np.ndarray | None = None) -> Iterator[Variant]:
    """Every layer in every precision, in order, holding one layer at a time.

    `tokens`: calibration text, int32 [sequences, length]; only "rtn" does without. Raises `ConfigError` if it lacks.
    """
    settings.check(calibrated=tokens is not None)
    if tokens is None or settings.method == "rtn":
        for index in range(checkpoint.config.num_layers):
            leaves = checkpoint.block(layer_name(index))
            for precision in settings.precisions:
                bits = bits_of(precision)
                rounded = round_layer(leaves, bits, group=settings.group, symmetric=settings.symmetric)
                yield Variant(index, precision, rounded)
        return
    make = {"awq": awq_layer, "gptq": gptq_layer}[settings.method]
    dtype = numpy_dtype(checkpoint.config)
    for index, leaves, inputs in calibrate(checkpoint, tokens, gram=settings.method == "gptq"):
        for precision in settings.precisions:
            bits = bits_of(precision)
            variant = make(leaves, inputs, bits, group=settings.group, symmetric=settings.symmetric, dtype=dtype)
            yield Variant(index, precision, variant)
