"""The work of `jaxserve profile`: makes a sensitivity profile from a checkpoint and two texts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jaxserve.calibration.sensitivity.chain import LayerChain, Variants
from jaxserve.calibration.sensitivity.curves import Begin, curves, orders, points
from jaxserve.calibration.sensitivity.greedy import rank
from jaxserve.calibration.sensitivity.measures import Measures, Positions
from jaxserve.calibration.sensitivity.profile import LayerScores, SensitivityProfile, Weights
from jaxserve.calibration.texts import Rows, read_rows
from jaxserve.checkpoint import Checkpoint, open_checkpoint
from jaxserve.checkpoint.variants import VariantStore, fingerprint
from jaxserve.core.block_names import layer_name
from jaxserve.core.errors import ConfigError
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.parallel.devices import devices
from jaxserve.planning.defaults import dtype_with_quantized
from jaxserve.quantization.layer import BITS, bits_of


@dataclass(frozen=True)
class Options:
    """The options of a profile."""

    precisions: tuple[str, ...] = ("int8", "int4", "int3")
    length: int = 256  # tokens of a sequence
    calib_tokens: int = 4096
    held_out_tokens: int = 4096
    weights: Weights = field(default_factory=Weights)
    positions: Positions = "all"
    seeds: int = 5  # number of random orders
    max_points: int = 17  # of a curve
    variants: Path | None = None  # a folder made by `jaxserve quantize`; None: the variants that an engine would run
    dtype: Literal["auto", "bfloat16", "float32"] = "float32"


def profile_model(
    folder: Path, calib: Path, held_out: Path | None, options: Options, begin: Begin = lambda what, steps: lambda: None
) -> SensitivityProfile:
    """Rank the layers on one text, and measure orders of swapping on another one.

    Without `held_out`, layers are ranked on the first half of the calibration text and measured on the second. Raise
    `ConfigError` for unsuitable options or texts, and `CheckpointError` for a model that cannot be read.
    """
    if not options.precisions:
        raise ConfigError(f"--precisions is empty: name at least one of {', '.join(BITS)}")
    for name in options.precisions:
        bits_of(name)
    # This comes first, so that an error at JAX's start is reported before the model is read.
    devices()
    checkpoint, tokenizer = open_checkpoint(folder, dtype=options.dtype), Tokenizer.load(folder)
    checkpoint = checkpoint.in_dtype(dtype_with_quantized(checkpoint.config.dtype))
    calibration, unseen = _read_texts(calib, held_out, tokenizer, options)
    return make_profile(checkpoint, calibration, unseen, options, begin)


def make_profile(
    checkpoint: Checkpoint,
    calibration: Rows,
    held_out: Rows,
    options: Options,
    begin: Begin = lambda what, steps: lambda: None,
) -> SensitivityProfile:
    """Make the profile of an open checkpoint, given the rows of both texts."""
    variants, methods = _variants(checkpoint, options)
    chain = LayerChain(checkpoint, variants)
    scores, found = {}, {}
    for name in methods:
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
        held_out=held_out.source,
        scores=scores,
        curves=found,
    )


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


def _read_texts(calib: Path, held_out: Path | None, tokenizer: Tokenizer, options: Options) -> tuple[Rows, Rows]:
    counts = [max(1, tokens // options.length) for tokens in (options.calib_tokens, options.held_out_tokens)]
    parts = ((0.0, 1.0), (0.0, 1.0)) if held_out else ((0.0, 0.5), (0.5, 1.0))
    calibration, unseen = (
        read_rows(path, tokenizer, options.length, count, part)
        for path, count, part in zip((calib, held_out or calib), counts, parts, strict=True)
    )
    if held_out and calibration.source.sha256 == unseen.source.sha256:
        raise ConfigError(f"{held_out}: is the calibration text: give another text for quality, or none")
    return calibration, unseen
