"""The work of `jaxserve quantize`: reads the calibration text, quantises, writes the store and shows progress."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from jaxserve.calibration.pipeline import QuantizationSettings, quantize_layers
from jaxserve.calibration.texts import read_texts
from jaxserve.checkpoint.loader import open_checkpoint
from jaxserve.checkpoint.variants import FOLDER, Method, VariantStore, VariantWriter
from jaxserve.core.errors import ConfigError
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.parallel.devices import devices
from jaxserve.planning.defaults import dtype_with_quantized


@dataclass(frozen=True)
class CalibrationText:
    """A file of calibration text, and the amount to use: `samples` pieces that are spread evenly over the file."""

    path: Path
    samples: int = 64
    length: int = 512  # tokens of a piece

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


def run(
    model: Path, settings: QuantizationSettings, text: CalibrationText | None = None, out: Path | None = None
) -> VariantStore:
    """Quantise a model, write its variants to `out` and open them. Progress goes to standard error.

    `out` is by default a folder in that of the model. Raise `ConfigError` if text is missing or unusable.
    """
    # This comes first, so that an error at JAX's start is reported before the model is read.
    devices()
    checkpoint = open_checkpoint(model, prepared=False)
    checkpoint = checkpoint.in_dtype(dtype_with_quantized(checkpoint.config.dtype))
    settings.check(calibrated=text is not None)
    tokens = None if text is None else text.tokens(Tokenizer.load(model))
    digest = None if tokens is None or settings.method == "rtn" else hashlib.sha256(tokens.tobytes()).hexdigest()
    method = Method(settings.method, settings.group, settings.symmetric, digest)
    writer = VariantWriter(out or model / FOLDER, checkpoint, dict.fromkeys(settings.precisions, method))
    total = checkpoint.config.num_layers * len(settings.precisions)
    with tqdm(total=total, desc="quantizing", unit="variant") as progress:
        for variant in quantize_layers(checkpoint, settings, tokens):
            size = writer.add(*variant)
            progress.set_postfix_str(f"layer {variant.index} in {variant.precision}: {size / 1e6:.2f} MB")
            progress.update()
    return writer.finish()
