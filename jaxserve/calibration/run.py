"""The work of `jaxserve quantize`: quantises on a text, measures the loss on held-out text, and writes the store."""

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Int

from jaxserve.calibration.losses import HeldOut
from jaxserve.calibration.own_text import Sampler, text_of
from jaxserve.calibration.pipeline import ROUNDING, QuantizationSettings, quantize_layers
from jaxserve.calibration.texts import read_texts
from jaxserve.checkpoint.loader import Checkpoint, open_checkpoint
from jaxserve.checkpoint.rounding import other_groups
from jaxserve.checkpoint.variants import FOLDER, Loss, Method, VariantStore, VariantWriter
from jaxserve.console.progress import Begin, ignore_phases
from jaxserve.core.config import ModelConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.scale_groups import GROUP
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.engine.tokenizer_files import has_vocabulary
from jaxserve.parallel.devices import devices
from jaxserve.planning.defaults import dtype_with_quantized

MAX_HELD_OUT = 8  # pieces of the text to measure on


@dataclass(frozen=True)
class CalibrationText:
    """A file of calibration text, and the amount to use: `samples` pieces that are spread evenly over the file."""

    path: Path
    samples: int = 64
    length: int = 128  # tokens of a piece

    def tokens(self, tokenizer: Tokenizer) -> np.ndarray:
        """Return the tokens of the pieces, int32 [pieces, length].

        Raise `ConfigError` if the file cannot be read or is too short.
        """
        pieces = [np.asarray(tokenizer.encode(text), np.int32) for text in read_texts(self.path)]
        ids = np.concatenate([*pieces, np.zeros(0, np.int32)])
        if len(ids) < self.length:
            raise ConfigError(
                f"{self.path}: has {len(ids)} tokens: it must have at least {self.length}, those of one piece "
                "(--calib-length)"
            )
        pieces = ids[: len(ids) // self.length * self.length].reshape(-1, self.length)
        return pieces[np.linspace(0, len(pieces) - 1, min(self.samples, len(pieces))).astype(int)]


@dataclass(frozen=True)
class Result:
    """The store that a run has written, and what it has measured."""

    store: VariantStore
    losses: Mapping[str, Loss]  # of the method that was asked for, by precision; empty without any text
    held_out: str  # a description of the text on which the losses were measured


@dataclass(frozen=True)
class _Text:
    """Pieces of text to calibrate on, and pieces to measure on."""

    calibration: Int[np.ndarray, "N L"]
    held_out: Int[np.ndarray, "H L"]
    source: str

    @classmethod
    def of(cls, pieces: Int[np.ndarray, "N L"], source: str) -> "_Text":
        """Hold out the last pieces. A single one serves both ends."""
        count = min(MAX_HELD_OUT, len(pieces) // 4) or 1
        return cls(pieces[:-count] if len(pieces) > 1 else pieces, pieces[-count:], source)

    def __str__(self) -> str:
        rows, length = self.held_out.shape
        return f"{rows * (length - 1):,} held-out tokens of {self.source}"


def run(
    model: Path,
    settings: QuantizationSettings,
    text: CalibrationText | None = None,
    out: Path | None = None,
    *,
    sample: Sampler | None = None,
    keep_method: bool = True,
    begin: Begin = ignore_phases,
) -> Result:
    """Quantise a model, measure what that costs, write its variants to `out` and open them.

    `out` is by default a folder in that of the model. Without a `text`, the model writes its own by `sample`. Without
    either, nothing is measured. Where the method loses no less than rounding, the rounded layers are stored unless
    `keep_method`. Raise `ConfigError` if text is missing or unusable.
    """
    # This comes first, so that an error at JAX's start is reported before the model is read.
    devices()
    checkpoint = open_checkpoint(model, prepared=False)
    checkpoint = checkpoint.in_dtype(dtype_with_quantized(checkpoint.config.dtype))
    settings.check(calibrated=text is not None or sample is not None)
    folder = out or model / FOLDER
    wanted = GROUP if settings.group is None else settings.group
    taken = {name: settings.format_of(name, checkpoint.config).group for name in settings.precisions}
    for line in other_groups(checkpoint.config, taken, wanted):
        print(line, file=sys.stderr)  # noqa: T201
    used = None if text is None else _given(checkpoint, text)
    # The folder is locked before the model writes its text there.
    writer = VariantWriter(folder, checkpoint, _methods(settings, used, checkpoint.config))
    if used is None and sample is not None:
        used = _own(checkpoint, folder, sample)
        for precision, method in _methods(settings, used, checkpoint.config).items():
            writer.begin(precision, method)
    held_out = None if used is None else HeldOut(checkpoint, used.held_out, settings)
    done = begin("quantising layers", checkpoint.config.num_layers * len(settings.precisions))
    for variant in quantize_layers(checkpoint, settings, None if used is None else used.calibration):
        if held_out is not None:
            held_out.read(*variant)
        writer.add(*variant)
        done()
    losses = {} if held_out is None else held_out.losses()
    kept = dict(losses)
    for precision, loss in losses.items():
        if loss.method >= loss.rounding and not keep_method and settings.method != ROUNDING:
            round_again(writer, checkpoint, replace(settings, precisions=(precision,), method=ROUNDING))
            kept[precision] = replace(loss, method=loss.rounding)
    return Result(writer.finish(kept), losses, str(used))


def _given(checkpoint: Checkpoint, text: CalibrationText) -> _Text:
    """Return the text of a file."""
    return _Text.of(text.tokens(Tokenizer.load(checkpoint.path)), str(text.path))


def _own(checkpoint: Checkpoint, folder: Path, sample: Sampler) -> _Text:
    """Return the text that the model has written, or writes now."""
    tokenizer = Tokenizer.load(checkpoint.path) if has_vocabulary(checkpoint.path) else None
    made = text_of(checkpoint, tokenizer, sample, folder)
    return _Text.of(made.pieces, "text that the model has written")


def _methods(settings: QuantizationSettings, text: _Text | None, config: ModelConfig) -> dict[str, Method]:
    """Return how each precision is made."""
    digest = None
    if text is not None and settings.method != ROUNDING:
        digest = hashlib.sha256(text.calibration.tobytes()).hexdigest()
    forms = {precision: settings.format_of(precision, config) for precision in settings.precisions}
    return {name: Method(settings.method, form.group, form.symmetric, digest) for name, form in forms.items()}


def round_again(writer: VariantWriter, checkpoint: Checkpoint, rounding: QuantizationSettings) -> None:
    """Write rounded layers in place of those of a precision."""
    for precision, method in _methods(rounding, None, checkpoint.config).items():
        writer.begin(precision, method)
    for variant in quantize_layers(checkpoint, rounding):
        writer.add(*variant)
