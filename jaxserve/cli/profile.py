"""The command `jaxserve profile`, which imports its implementation only when it runs, so that --help is fast."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jaxserve.calibration.sensitivity.profile import FILE_NAME, QualityCurve, Weights
from jaxserve.cli.terminal import console
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import ensure_file

if TYPE_CHECKING:
    from jaxserve.calibration.sensitivity.curves import Begin
    from jaxserve.calibration.sensitivity.profile import SensitivityProfile


MEASURES = ("cross_entropy", "kl", "top1")
HEADINGS = ("cross-entropy, nats", "KL, nats", "top-1 agreement, %")
DECIMALS = (4, 5, 2)


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, **more)


def profile(
    model: Annotated[
        Path | None,
        typer.Argument(help="Folder in Hugging Face layout. Default: the bundled model.", show_default=False),
    ] = None,
    *,
    calib: Annotated[Path, _option('Text to rank layers on: a text file, or .jsonl with a "text" in each line.')],
    held_out: Annotated[
        Path | None,
        _option("Text to measure quality on. Default: the second half of --calib.", show_default=False),
    ] = None,
    precisions: Annotated[
        str, _option("Precisions to rank for, separated by commas: int8, int4, int3.")
    ] = "int8,int4,int3",
    variants: Annotated[
        Path | None,
        _option("Folder from `jaxserve quantize`. Default: what an engine would run.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, _option(f"Profile to write. Default: {FILE_NAME} in the model's folder.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, _option("Plot to write (PNG). Default: next to the profile.", show_default=False)
    ] = None,
    calib_tokens: Annotated[int, _option("Tokens to rank on.", min=1)] = 4096,
    held_out_tokens: Annotated[int, _option("Tokens to measure quality on.", min=1)] = 4096,
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
    """Rank a model's layers by how little it costs to swap them for quantised ones."""
    chosen = tuple(dict.fromkeys(name.strip() for name in precisions.split(",") if name.strip()))
    score_weights = _parse_weights(weights)
    from jaxserve.calibration.sensitivity.plot import draw
    from jaxserve.calibration.sensitivity.run import Options, profile_model
    from jaxserve.core.bundled import bundled_model_path

    folder = model or bundled_model_path()
    path = out or folder / FILE_NAME
    picture = plot or path.with_suffix(".png")
    for file in (path, picture):
        ensure_file(file, "--out, --plot")
    options = Options(
        chosen, length, calib_tokens, held_out_tokens, score_weights, positions, seeds, variants=variants, dtype=dtype
    )
    with _progress() as begin:
        made = profile_model(folder, calib, held_out, options, begin)
    _print(made)  # before saving, which may fail
    made.save(path)
    picture.write_bytes(draw(made))
    console.print(f"saved {path} and {picture}", markup=False, soft_wrap=True)


def _parse_weights(text: str) -> Weights:
    """Return the weights in a list such as "0.25,0.25,0.5". Raise `ConfigError` if one is negative or all are 0."""
    try:
        lts, lrs, mds = map(float, text.split(","))
    except ValueError:
        raise ConfigError(f"--weights is {text!r}: give three numbers with commas, such as 0.25,0.25,0.5") from None
    if not (min(lts, lrs, mds) >= 0 and 0 < lts + lrs + mds < math.inf):
        raise ConfigError(f"--weights is {text!r}: each must be at least 0, and one of them above 0")
    return Weights(lts, lrs, mds)


@contextlib.contextmanager
def _progress() -> Iterator["Begin"]:
    """Show a progress bar on standard error for each phase."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console)
    with contextlib.ExitStack() as shown:

        def begin(what: str, steps: int) -> Callable[[], None]:
            if not progress.live.is_started:  # not earlier: an empty bar prints an empty line
                shown.enter_context(progress)
            return partial(progress.advance, progress.add_task(what, total=steps))

        yield begin


def _print(made: "SensitivityProfile") -> None:
    """Print the swap orders, and for each kind of order the mean loss over the number of swapped layers."""
    from rich.table import Table

    for precision in made.precisions:
        table = Table("order", *HEADINGS, title=f"{precision}: mean over the number of swapped layers")
        for name, found in made.curves[precision].items():
            table.add_row(name, *(mean_and_range(found, measure) for measure in MEASURES))
        console.print(table)
        layers = ", ".join(map(str, made.order(precision)))
        console.print(f"swap to {precision} in this order ({made.order_name(precision)}): {layers}", soft_wrap=True)


def mean_and_range(curves: Sequence[QualityCurve], measure: str) -> str:
    """Return the mean area under the curves of one kind of order and, for several curves, its range.

    Top-1 agreement is in percent.
    """
    areas = [curve.area(measure) * (100 if measure == "top1" else 1) for curve in curves]
    mean, lowest, highest = (
        f"{area:.{DECIMALS[MEASURES.index(measure)]}f}" for area in (sum(areas) / len(areas), min(areas), max(areas))
    )
    return mean if len(areas) == 1 else f"{mean} ({lowest}-{highest})"
