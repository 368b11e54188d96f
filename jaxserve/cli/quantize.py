"""The command `jaxserve quantize`, which imports its implementation only when it runs, so that --help is fast."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jaxserve.cli.options import MODEL
from jaxserve.cli.terminal import configure_logging
from jaxserve.console.bars import console
from jaxserve.console.progress import phases, start_progress

if TYPE_CHECKING:
    from jaxserve.calibration.pipeline import QuantizationSettings
    from jaxserve.calibration.run import Result


def quantize(
    model: Annotated[str | None, typer.Argument(help=MODEL, show_default=False)] = None,
    *,
    precisions: Annotated[
        str, typer.Option(help="Precisions to prepare, separated by commas: int8, int4, int3.")
    ] = "int8,int4,int3",
    method: Annotated[
        Literal["awq", "gptq", "rtn"] | None,
        typer.Option(
            help="awq: activation-aware scaling; gptq: error compensation; rtn: rounding to the nearest. Default: awq,"
            " or rtn for a precision in which awq loses no less.",
            show_default=False,
        ),
    ] = None,
    calib: Annotated[
        Path | None,
        typer.Option(
            help='Text to calibrate and to measure on: a text file, or .jsonl with a "text" in each line. Default: text'
            " that the model writes.",
            show_default=False,
        ),
    ] = None,
    calib_samples: Annotated[int, typer.Option(help="Number of pieces of --calib to use.", min=1)] = 64,
    calib_length: Annotated[int, typer.Option(help="Length of each piece in tokens.", min=2)] = 128,
    group: Annotated[
        int | None,
        typer.Option(
            help="Inputs that share a scale: 128, 64 or 32, or less where that does not divide a weight's inputs; "
            "0: all. Default: 128, or 32 in int4 and int3 if 128 does not divide the inputs of all weights.",
            show_default=False,
        ),
    ] = None,
    zero_points: Annotated[
        bool, typer.Option("--zero-points", help="Give every scale a zero point, so that ranges need not be symmetric.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write to. Default: variants in the model's folder.", show_default=False),
    ] = None,
) -> None:
    """Quantise a model's layers, print what that costs, and store them next to the model."""
    from jaxserve.calibration.pipeline import QuantizationSettings
    from jaxserve.calibration.run import CalibrationText, run
    from jaxserve.checkpoint.local import local_folder
    from jaxserve.cli.own_text import sampler
    from jaxserve.core.bundled import bundled_model_path

    configure_logging("warning")
    with start_progress() as progress:
        folder = bundled_model_path() if model is None else local_folder(model, progress)
    chosen = tuple(dict.fromkeys(name.strip() for name in precisions.split(",") if name.strip()))
    settings = QuantizationSettings(chosen, method or "awq", group, symmetric=not zero_points)
    text = None if calib is None else CalibrationText(calib, calib_samples, calib_length)
    with phases() as begin:
        sample, keep = sampler(folder, begin), method is not None
        result = run(folder, settings, text, out, sample=sample, keep_method=keep, begin=begin)
    _print(result, settings)


def _print(result: "Result", settings: "QuantizationSettings") -> None:
    """Print what was stored in each precision: its bytes, and what it loses beside rounding."""
    from jaxserve.console.tables import print_table

    store, full = result.store, next(iter(result.losses.values())).full
    rows = []
    for precision, loss in result.losses.items():
        sizes = [store.nbytes(index, precision) for index in range(store.num_layers)]
        each = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} - {max(sizes):,}"
        lost = f"{loss.rounding:+.4f}", f"{loss.method:+.4f}"
        rows.append((precision, store.method(precision).name, each, f"{sum(sizes):,}", *lost))
    columns = ("precision", "method", "bytes of a layer", "of all", "rounding", settings.method)
    print_table(columns, rows, console, title=str(store.path))
    console.print(
        f"the last columns: nats a token that are lost, of {full:.4f} in full precision, on {result.held_out}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    for precision, loss in result.losses.items():
        if loss.method >= loss.rounding and settings.method != "rtn":
            kept = store.method(precision).name
            what = "rounding is stored" if kept == "rtn" else f"it is stored because of --method {kept}"
            console.print(f"{precision}: {settings.method} loses no less than rounding: {what}", soft_wrap=True)
