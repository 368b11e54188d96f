"""The work of `jaxserve profile`: makes a sensitivity profile from a checkpoint and a text."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int

from jaxserve.calibration.own_text import FILE_NAME as OWN_TEXT, Sampler, text_of
from jaxserve.calibration.sensitivity.chain import LayerChain, Variants
from jaxserve.calibration.sensitivity.curves import curves, orders, points, qualities
from jaxserve.calibration.sensitivity.greedy import rank
from jaxserve.calibration.sensitivity.measures import Measures, Positions
from jaxserve.calibration.sensitivity.profile import LayerLosses, LayerScores, SensitivityProfile, Text, Weights
from jaxserve.calibration.texts import Rows, read_rows
from jaxserve.checkpoint import Checkpoint, open_checkpoint
from jaxserve.checkpoint.kept import kept_folder
from jaxserve.checkpoint.variants import VariantStore, fingerprint
from jaxserve.compilation.cache import user_cache_folder
from jaxserve.console.progress import Begin, ignore_phases
from jaxserve.core.block_names import layer_name
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import writing
from jaxserve.core.numeric import ceil_div
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.engine.tokenizer_files import has_vocabulary
from jaxserve.parallel.devices import devices
from jaxserve.planning.defaults import dtype_with_quantized
from jaxserve.quantization.layer import BITS, bits_of


@dataclass(frozen=True)
class Options:
    """The options of a profile."""

    precisions: tuple[str, ...] = ("int8", "int4", "int3")
    length: int = 256  # tokens of a sequence
    tokens: int = 512
    compare_orders: bool = False  # rank the layers by similarities, and measure orders of swapping
    held_out_tokens: int = 4096  # to measure orders on
    weights: Weights = field(default_factory=Weights)
    positions: Positions = "all"
    seeds: int = 5  # number of random orders
    max_points: int = 17  # of a curve
    variants: Path | None = None  # a folder made by `jaxserve quantize`; None: the variants that an engine would run
    dtype: Literal["auto", "bfloat16", "float32"] = "float32"


def profile_model(
    folder: Path,
    calib: Path | None,
    held_out: Path | None,
    options: Options,
    begin: Begin = ignore_phases,
    sample: Sampler | None = None,
) -> SensitivityProfile:
    """Measure what each layer loses in each precision on a text. Without `calib`, the model writes it by `sample`.

    To compare orders, rank the layers on the text and measure orders of swapping on another one. Without `held_out`,
    the first half of the text is used for ranking and the second half for measuring. Raise `ConfigError` for unsuitable
    options or texts, and `CheckpointError` for a model that cannot be read.
    """
    if not options.precisions:
        raise ConfigError(f"--precisions is empty: name at least one of {', '.join(BITS)}")
    for name in options.precisions:
        bits_of(name)
    # This comes first, so that an error at JAX's start is reported before the model is read.
    devices()
    checkpoint = open_checkpoint(folder, dtype=options.dtype)
    checkpoint = checkpoint.in_dtype(dtype_with_quantized(checkpoint.config.dtype))
    if calib is None:
        if sample is None or options.compare_orders:
            raise ConfigError("no text is given to compare orders on (--calib FILE)")
        return make_profile(checkpoint, _own_rows(checkpoint, options, sample), None, options, begin)
    calibration, unseen = _read_texts(calib, held_out, Tokenizer.load(folder), options)
    return make_profile(checkpoint, calibration, unseen, options, begin)


def _own_rows(checkpoint: Checkpoint, options: Options, sample: Sampler) -> Rows:
    """Return rows of text that the model has written, or writes now, beside its prepared variants."""
    folder = kept_folder(checkpoint.path, user_cache_folder())
    if folder is None:
        raise ConfigError(f"{checkpoint.path}: its text cannot be kept there (--calib FILE)")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.load(checkpoint.path) if has_vocabulary(checkpoint.path) else None
    text = text_of(checkpoint, tokenizer, sample, folder)
    count = min(len(text.pieces), ceil_div(options.tokens, text.pieces.shape[1]))
    digest = hashlib.sha256(text.pieces.tobytes()).hexdigest()
    return Rows(text.pieces[-count:], Text(OWN_TEXT, digest, (0.0, 1.0), *text.pieces[-count:].shape))


def make_profile(
    checkpoint: Checkpoint,
    calibration: Rows,
    held_out: Rows | None,
    options: Options,
    begin: Begin = ignore_phases,
) -> SensitivityProfile:
    """Make the profile of an open checkpoint from the rows of a text. Orders are compared on `held_out`, if given."""
    variants, methods = _variants(checkpoint, options)
    chain = LayerChain(checkpoint, variants)
    losses, scores, found = {}, {}, {}
    for name in methods:
        if held_out is None:
            losses[name] = layer_losses(chain, calibration.tokens, name, begin)
            continue
        scores[name] = rank_layers(Measures(chain, calibration.tokens[:, :-1], name, options.positions), options, begin)
        compared, at = orders(scores[name], options.seeds), points(chain.config.num_layers, options.max_points)
        found[name] = curves(chain, held_out.tokens, name, compared, at, begin)
    return SensitivityProfile(
        model=checkpoint.path.resolve().name,
        model_sha256=fingerprint(checkpoint),
        num_layers=checkpoint.config.num_layers,
        methods=methods,
        weights=options.weights,
        positions=options.positions,
        calibration=calibration.source,
        held_out=None if held_out is None else held_out.source,
        losses=losses,
        scores=scores,
        curves=found,
    )


def layer_losses(
    chain: LayerChain,
    rows: Int[np.ndarray, "N S+1"],
    precision: str,
    begin: Begin = ignore_phases,
) -> LayerLosses:
    """Measure what a text loses with each layer alone in a precision, and with all of them."""
    layers = range(chain.config.num_layers)
    found = qualities(chain, rows, precision, [*(frozenset({layer}) for layer in layers), frozenset(layers)], begin)
    kl = {swapped: max(0.0, float(values[1])) for swapped, values in found.items()}
    alone = tuple(kl[frozenset({layer})] for layer in layers)
    return LayerLosses(alone, kl[frozenset(layers)], float(found[frozenset()][0]))


def rank_layers(measures: Measures, options: Options, begin: Begin) -> LayerScores:
    """Return the LIS order for one precision, with its scores."""
    lts, lrs = measures.local()
    weights = options.weights
    local = [weights.lts * a + weights.lrs * b for a, b in zip(lts, lrs, strict=True)]
    ranking = rank(local, measures.degradation, weights.mds, begin(f"{measures.precision}: order", len(local)))
    layers, mds, lis = zip(*((choice.layer, choice.mds, choice.lis) for choice in ranking.choices), strict=True)
    return LayerScores(order=layers, lts=lts, lrs=lrs, mds=ranking.first_mds, lis=lis, chosen_mds=mds)


def _variants(checkpoint: Checkpoint, options: Options) -> tuple[Variants, dict[str, str]]:
    """Return the source of quantised layers, and their methods of quantisation by precision."""
    if options.variants is None:
        layers = checkpoint.config.block_ids[1:-1]
        made = {name: dict.fromkeys(checkpoint.method(layer, name) for layer in layers) for name in options.precisions}
        methods = {name: ", ".join(each) for name, each in made.items()}
        return lambda number, precision: checkpoint.variant(layer_name(number), precision), methods
    store = VariantStore.open(options.variants)
    store.check(checkpoint)
    return store.layer, {name: store.method(name).name for name in options.precisions}


def _read_texts(calib: Path, held_out: Path | None, tokenizer: Tokenizer, options: Options) -> tuple[Rows, Rows | None]:
    counts = [max(1, tokens // options.length) for tokens in (options.tokens, options.held_out_tokens)]
    if not options.compare_orders:
        return read_rows(calib, tokenizer, options.length, counts[0]), None
    parts = ((0.0, 1.0), (0.0, 1.0)) if held_out else ((0.0, 0.5), (0.5, 1.0))
    calibration, unseen = (
        read_rows(path, tokenizer, options.length, count, part)
        for path, count, part in zip((calib, held_out or calib), counts, parts, strict=True)
    )
    if held_out and calibration.source.sha256 == unseen.source.sha256:
        raise ConfigError(f"{held_out}: is the calibration text: give another text for quality, or none")
    return calibration, unseen
