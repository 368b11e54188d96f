"""Quantises the layers of a model to fewer bits, one layer at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from jaxserve.calibration.activations import calibrate
from jaxserve.calibration.awq import awq_layer
from jaxserve.calibration.gptq import gptq_layer
from jaxserve.checkpoint.loader import Checkpoint
from jaxserve.checkpoint.mapping import numpy_dtype
from jaxserve.checkpoint.rounding import rounded_layer
from jaxserve.core.block_names import layer_name
from jaxserve.core.config import ModelConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.scale_groups import GROUPS
from jaxserve.models.quantized import wanted_group
from jaxserve.quantization.layer import LayerFormat, Leaves, bits_of

Method = Literal["rtn", "awq", "gptq"]
METHODS = get_args(Method)
ROUNDING: Method = "rtn"


@dataclass(frozen=True)
class QuantizationSettings:
    """The precisions to make, and the method of quantisation."""

    precisions: tuple[str, ...]
    method: Method = "awq"
    group: int | None = None  # inputs that share a scale; 0 for all of an output, None: by the model
    symmetric: bool = True  # without zero points

    def __post_init__(self):
        if not self.precisions:
            raise ConfigError("no precision is given to quantize to: give at least one")
        for precision in self.precisions:
            bits_of(precision)
        if self.method not in METHODS:
            raise ConfigError(f"unknown method {self.method!r}: choose from {', '.join(METHODS)}")
        if self.group not in (None, 0, *GROUPS):
            groups = ", ".join(map(str, sorted(GROUPS)))
            raise ConfigError(f"group is {self.group}: choose from {groups} inputs, or 0 for all inputs")

    def format_of(self, precision: str, config: ModelConfig) -> LayerFormat:
        """Return the format of a model's layers in a precision."""
        bits = bits_of(precision)
        group = wanted_group(config, bits) if self.group is None else self.group
        return LayerFormat(bits, group, self.symmetric, numpy_dtype(config))

    def check(self, *, calibrated: bool) -> None:
        """Raise `ConfigError` if the method needs calibration text and `calibrated` is false."""
        if self.method != ROUNDING and not calibrated:
            raise ConfigError(f"method {self.method!r} needs calibration text (--calib FILE): only rtn needs none")


class Variant(NamedTuple):
    """A layer in one of the requested precisions."""

    index: int
    precision: str
    leaves: Leaves


def quantize_layers(
    checkpoint: Checkpoint, settings: QuantizationSettings, tokens: np.ndarray | None = None
) -> Iterator[Variant]:
    """Yield every layer in every precision, in order, with one layer in memory at a time.

    `tokens` is the calibration text, int32 [sequences, length]. Only "rtn" needs none. Raise `ConfigError` if the text
    is missing.
    """
    settings.check(calibrated=tokens is not None)
    if tokens is None or settings.method == ROUNDING:
        for index in range(checkpoint.config.num_layers):
            leaves = checkpoint.block(layer_name(index))
            for precision in settings.precisions:
                form = settings.format_of(precision, checkpoint.config)
                yield Variant(index, precision, rounded_layer(leaves, form))
        return
    quantize_layer = {"awq": awq_layer, "gptq": gptq_layer}[settings.method]
    for index, leaves, inputs in calibrate(checkpoint, tokens, gram=settings.method == "gptq"):
        for precision in settings.precisions:
            form = settings.format_of(precision, checkpoint.config)
            yield Variant(index, precision, quantize_layer(leaves, inputs, form))
