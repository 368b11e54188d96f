"""The command `jaxserve profile`, which imports its implementation only when it runs, so that --help is fast."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jaxserve.calibration.sensitivity.profile import FILE_NAME, LayerLosses, QualityCurve, Weights
from jaxserve.cli.options import MODEL
from jaxserve.cli.terminal import configure_logging
from jaxserve.console.bars import console
from jaxserve.console.progress import phases, start_progress
from jaxserve.core.errors import ConfigError
from jaxserve.core.extras import require_extra
from jaxserve.core.files import ensure_file, write_file

if TYPE_CHECKING:
    from jaxserve.calibration.sensitivity.profile import SensitivityProfile


MEASURES = ("cross_entropy", "kl", "top1")
HEADINGS = ("cross-entropy, nats", "KL, nats", "top-1 agreement, %")
DECIMALS = (4, 5, 2)


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, **more)


OF_ORDERS = (
    "held_out",
    "held_out_tokens",
    "plot",
    "positions",
    "weights",
    "seeds",
)  # read by --compare-orders alone


def profile(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help=MODEL, show_default=False)] = None,
    *,
    calib: Annotated[
        Path | None,
        _option(
            'Text to measure on: a text file, or .jsonl with a "text" in each line. Default: text of the model itself.',
            show_default=False,
        ),
    ] = None,
    precisions: Annotated[
        str, _option("Precisions to measure, separated by commas: int8, int4, int3.")
    ] = "int8,int4,int3",
    variants: Annotated[
        Path | None,
        _option("Folder from `jaxserve quantize`. Default: what an engine would run.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, _option(f"Profile to write. Default: {FILE_NAME} in the model's folder.", show_default=False)
    ] = None,
    calib_tokens: Annotated[int, _option("Tokens to measure on.", min=1)] = 512,
    compare_orders: Annotated[
        bool,
        _option("Rank layers by similarities, and measure orders of swapping on held-out text. It takes far longer."),
    ] = False,
    held_out: Annotated[
        Path | None,
        _option("Text to measure orders on. Default: the second half of --calib.", show_default=False),
    ] = None,
    held_out_tokens: Annotated[int, _option("Tokens to measure orders on.", min=1)] = 4096,
    plot: Annotated[
        Path | None, _option("Plot of the orders to write (PNG). Default: next to the profile.", show_default=False)
    ] = None,
    length: Annotated[int, _option("Tokens per sequence.", min=2)] = 256,
    positions: Annotated[
        Literal["all", "last"], _option("Tokens at which vectors are compared: all, or the last of each sequence.")
    ] = "all",
    weights: Annotated[str, _option("Weights of LTS, LRS and MDS in the score.")] = "0.25,0.25,0.5",
    seeds: Annotated[int, _option("Number of random orders to compare with.", min=1)] = 5,
    dtype: Annotated[
        Literal["float32", "bfloat16", "auto"], _option("Precision of the computation; auto: the checkpoint's.")
    ] = "float32",
) -> None:
    """Measure what each of a model's layers loses in fewer bits, by which policies choose the layers to change."""
    if not compare_orders:
        _refuse_options_of_orders(context)
    chosen = tuple(dict.fromkeys(name.strip() for name in precisions.split(",") if name.strip()))
    score_weights = _parse_weights(weights)
    if compare_orders:
        require_extra("bench", "matplotlib", purpose="the plot of orders")
    from jaxserve.calibration.sensitivity.run import Options, profile_model
    from jaxserve.checkpoint.local import local_folder
    from jaxserve.cli.own_text import sampler
    from jaxserve.core.bundled import bundled_model_path

    configure_logging("warning")
    with start_progress() as progress:
        folder = bundled_model_path() if model is None else local_folder(model, progress)
    path = out or folder / FILE_NAME
    picture = plot or path.with_suffix(".png")
    for file in (path, picture) if compare_orders else (path,):
        ensure_file(file, "--out, --plot")
    options = Options(
        chosen,
        length,
        calib_tokens,
        compare_orders,
        held_out_tokens,
        score_weights,
        positions,
        seeds,
        variants=variants,
        dtype=dtype,
    )
    with phases() as begin:
        made = profile_model(folder, calib, held_out, options, begin, sampler(folder, begin))
    _print(made)  # before saving, which may fail
    made.save(path)
    if compare_orders:
        from jaxserve.calibration.sensitivity.plot import draw

        write_file(picture, draw(made))
    saved = f"{path} and {picture}" if compare_orders else path
    console.print(f"saved {saved}", markup=False, soft_wrap=True)


def _refuse_options_of_orders(context: typer.Context) -> None:
    """Raise `ConfigError` for an option on the command line that concerns the comparison of orders alone."""
    for name in OF_ORDERS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"--{name.replace('_', '-')} concerns orders of swapping alone: add --compare-orders")


def _parse_weights(text: str) -> Weights:
    """Return the weights in a list such as "0.25,0.25,0.5". Raise `ConfigError` if one is negative or all are 0."""
    try:
        lts, lrs, mds = map(float, text.split(","))
    except ValueError:
        raise ConfigError(f"--weights is {text!r}: give three numbers with commas, such as 0.25,0.25,0.5") from None
    if not (min(lts, lrs, mds) >= 0 and 0 < lts + lrs + mds < math.inf):
        raise ConfigError(f"--weights is {text!r}: each must be at least 0, and one of them above 0")
    return Weights(lts, lrs, mds)


def _print(made: "SensitivityProfile") -> None:
    """Print the swap orders, and what the layers lose or, for each kind of compared order, its mean loss."""
    from jaxserve.console.tables import print_table

    for precision in made.precisions:
        layers = ", ".join(map(str, made.order(precision)))
        if precision in made.losses:
            _print_losses(precision, made.losses[precision])
            console.print(f"layers change to {precision} in this order: {layers}", soft_wrap=True)
            continue
        rows = [
            (name, *(mean_and_range(found, measure) for measure in MEASURES))
            for name, found in made.curves[precision].items()
        ]
        title = f"{precision}: mean over the number of swapped layers"
        print_table(("order", *HEADINGS), rows, console, title)
        console.print(f"swap to {precision} in this order ({made.order_name(precision)}): {layers}", soft_wrap=True)


def _print_losses(precision: str, losses: LayerLosses) -> None:
    """Print what each layer loses, as nats and as a share of full precision's cross-entropy."""
    from jaxserve.console.tables import print_table

    added = {str(layer): nats for layer, nats in enumerate(losses.added)} | {"all together": losses.together}
    rows = [(name, f"{nats:.5f}", f"{nats / losses.cross_entropy:.3%}") for name, nats in added.items()]
    title = f"{precision}: loss beside {losses.cross_entropy:.3f} nats"
    print_table(("layers", "nats a token", "share"), rows, console, title)


def mean_and_range(curves: Sequence[QualityCurve], measure: str) -> str:
    """Return the mean area under the curves of one kind of order and, for several curves, its range.

    Top-1 agreement is in percent.
    """
    areas = [curve.area(measure) * (100 if measure == "top1" else 1) for curve in curves]
    mean, lowest, highest = (
        f"{area:.{DECIMALS[MEASURES.index(measure)]}f}" for area in (sum(areas) / len(areas), min(areas), max(areas))
    )
    return mean if len(areas) == 1 else f"{mean} ({lowest}-{highest})"
