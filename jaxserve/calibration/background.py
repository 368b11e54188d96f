"""The work of the background process of a server: prepares layers of a model and measures what they lose.

All of it is on text that the model writes itself. Whatever is complete is kept and not made again, so that the process
may end at any time.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.calibration import own_text
from jaxserve.calibration.losses import HeldOut
from jaxserve.calibration.own_text import OwnText, Sampler
from jaxserve.calibration.pipeline import ROUNDING, QuantizationSettings, Variant, quantize_layers
from jaxserve.calibration.run import round_again
from jaxserve.calibration.sensitivity.chain import LayerChain, Variants
from jaxserve.calibration.sensitivity.curves import qualities
from jaxserve.calibration.sensitivity.kept_profile import kept_profile
from jaxserve.calibration.sensitivity.profile import FILE_NAME, SensitivityProfile, Text, Weights
from jaxserve.calibration.sensitivity.rounding_costs import (
    FILE_NAME as COSTS,
    RoundingCost,
    load_costs,
    save_costs,
)
from jaxserve.calibration.sensitivity.run import layer_losses
from jaxserve.checkpoint import Checkpoint
from jaxserve.checkpoint.kept import KeptLayers, write_sums
from jaxserve.checkpoint.variants import Method, VariantWriter, fingerprint
from jaxserve.core.block_names import layer_name
from jaxserve.core.config import DType
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.quantization.layer import BITS, Leaves

log = logging.getLogger(__name__)

MEASURED = 4  # pieces of the text to measure on
METHOD = "awq"


@dataclass(frozen=True)
class Wanted:
    """A description of what a server wants to know about its model, which JSON can hold."""

    model: str
    folder: str  # to keep it in
    variants: tuple[str, ...] = ()  # precisions that layers may change to
    rounded: tuple[tuple[str, tuple[int, ...]], ...] = ()  # precisions that layers are served in, rounded, and these
    dtype: DType = "bfloat16"
    pieces: int = 40  # of text
    tokenizer: str | None = None  # None: the model's

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> "Wanted":
        """Return what JSON describes."""
        rounded = tuple((precision, tuple(layers)) for precision, layers in described["rounded"])
        return cls(**{**described, "variants": tuple(described["variants"]), "rounded": rounded})

    @property
    def prepared(self) -> tuple[str, ...]:
        """The precisions in which layers are prepared: those that lose much when they are rounded."""
        return tuple(name for name in self.variants if BITS[name] < 8)


def missing(wanted: Wanted, checkpoint: Checkpoint) -> bool:
    """Return whether something that a server wants is not kept yet."""
    folder = Path(wanted.folder)
    if wanted.variants:
        kept = KeptLayers(checkpoint, folder, wanted.prepared)
        found = kept_profile(kept)
        layers = set(wanted.prepared) <= {*kept.precisions, *_of_others(checkpoint, wanted.prepared)}
        if not layers or found is None or not set(wanted.variants) <= set(found.precisions):
            return True
    if not wanted.rounded:
        return False
    costs = load_costs(folder / COSTS, partial(fingerprint, checkpoint))
    return any(name not in costs or costs[name].layers != layers for name, layers in wanted.rounded)


def prepare(wanted: Wanted, checkpoint: Checkpoint, tokenizer: Tokenizer | None, sample: Sampler) -> None:
    """Prepare and measure what is missing. Raise `ConfigError` or `CheckpointError` if files cannot be written."""
    folder, model = Path(wanted.folder), fingerprint(checkpoint)
    text = own_text.text_of(checkpoint, tokenizer, sample, folder, wanted.pieces)
    calibration, rows = text.parts(MEASURED)
    for precision in wanted.prepared:
        kept = KeptLayers(checkpoint, folder, (precision,)).precisions
        if precision not in (*kept, *_of_others(checkpoint, (precision,))):
            _prepare_layers(checkpoint, precision, calibration, rows, folder)
    if wanted.variants:
        _measure_variants(wanted, checkpoint, text, rows, folder)
    if wanted.rounded:
        costs = load_costs(folder / COSTS, lambda: model)
        for precision, layers in wanted.rounded:
            costs[precision] = _rounding_cost(checkpoint, precision, layers, calibration, rows)
            save_costs(folder / COSTS, model, costs)


def _of_others(checkpoint: Checkpoint, precisions: tuple[str, ...]) -> tuple[str, ...]:
    """Return the precisions in which somebody has prepared the layers."""
    return tuple(name for name in precisions if not checkpoint.is_rounded(layer_name(0), name))


def quantization_settings(precision: str) -> QuantizationSettings:
    """Return how layers are prepared: with the groups that rounded ones have, so that they fit the same programs."""
    return QuantizationSettings((precision,), METHOD)


def _prepare_layers(checkpoint: Checkpoint, precision: str, tokens: np.ndarray, rows: np.ndarray, folder: Path) -> None:
    """Prepare all layers and keep them, or rounded ones if those lose no more on the text to measure on."""
    settings = quantization_settings(precision)
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()
    form = settings.format_of(precision, checkpoint.config)
    method = Method(settings.method, form.group, form.symmetric, digest)
    writer, held_out = VariantWriter(folder, checkpoint, {precision: method}), HeldOut(checkpoint, rows, settings)
    for variant in quantize_layers(checkpoint, settings, tokens):
        held_out.read(*variant)
        writer.add(*variant)
    loss = held_out.losses()[precision]
    if loss.method >= loss.rounding:
        round_again(writer, checkpoint, replace(settings, method=ROUNDING))
    writer.finish()
    write_sums(folder, precision)


def _measure_variants(wanted: Wanted, checkpoint: Checkpoint, text: OwnText, rows: np.ndarray, folder: Path) -> None:
    """Measure what each layer loses alone in each precision that layers may change to, and keep the profile."""
    source = KeptLayers(checkpoint, folder, wanted.prepared)
    chain = _chain(checkpoint, lambda index, precision: source.variant(layer_name(index), precision))
    losses = {name: layer_losses(chain, rows, name) for name in wanted.variants}
    described = Text(own_text.FILE_NAME, _digest(text), (0.0, 1.0), *rows.shape)
    SensitivityProfile(
        model=checkpoint.path.resolve().name,
        model_sha256=text.model,
        num_layers=checkpoint.config.num_layers,
        methods={name: source.method(layer_name(0), name) for name in wanted.variants},
        weights=Weights(),
        positions="all",
        calibration=described,
        held_out=None,
        losses=losses,
        scores={},
        curves={},
    ).save(folder / FILE_NAME)


def _rounding_cost(
    checkpoint: Checkpoint, precision: str, layers: tuple[int, ...], tokens: np.ndarray, rows: np.ndarray
) -> RoundingCost:
    """Measure layers that are rounded, and the same layers as AWQ makes them from the text."""
    rounded = _loss(
        checkpoint, precision, layers, rows, lambda index, _: checkpoint.variant(layer_name(index), precision)
    )
    made = quantize_layers(checkpoint, quantization_settings(precision), tokens)
    prepared = _loss(checkpoint, precision, layers, rows, partial(_next_layer, made))
    return RoundingCost(layers, rounded[1], prepared[1], rounded[0])


def _next_layer(made: Iterator[Variant], index: int, precision: str) -> Leaves:
    """Return a layer from an iterator that yields all layers in order."""
    return next(variant.leaves for variant in made if (variant.index, variant.precision) == (index, precision))


def _loss(
    checkpoint: Checkpoint, precision: str, layers: tuple[int, ...], rows: np.ndarray, variants: Variants
) -> tuple[float, float]:
    """Return full precision's cross-entropy, and what is added to it with these layers in a precision."""
    swapped = frozenset(layers)
    found = qualities(_chain(checkpoint, variants), rows, precision, [swapped])
    return float(found[frozenset()][0]), max(0.0, float(found[swapped][1]))


def _chain(checkpoint: Checkpoint, variants: Variants) -> LayerChain:
    """Return the layers, computed in float32, so that small losses are not lost in rounding, one in memory at once."""
    return LayerChain(checkpoint.in_dtype("float32"), variants, keep_bytes=0)  # a pass reads each layer once


def _digest(text: OwnText) -> str:
    return hashlib.sha256(text.pieces.tobytes()).hexdigest()
