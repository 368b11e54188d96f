"""The command `jaxserve quantize`, which imports its implementation only when it runs, so that --help is fast."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jaxserve.cli.terminal import console

if TYPE_CHECKING:
    from jaxserve.checkpoint.variants import VariantStore

app = typer.Typer()


@app.command()
def quantize(
    model: Annotated[
        Path | None,
        typer.Argument(help="Folder in Hugging Face layout. Default: the bundled model.", show_default=False),
    ] = None,
    *,
    precisions: Annotated[
        str, typer.Option(help="Precisions to prepare, separated by commas: int8, int4, int3.")
    ] = "int8,int4,int3",
    method: Annotated[
        Literal["awq", "gptq", "rtn"],
        typer.Option(help="awq: activation-aware scaling; gptq: error compensation; rtn: rounding to the nearest."),
    ] = "awq",
    calib: Annotated[
        Path | None,
        typer.Option(
            help='Calibration text for awq and gptq: a text file, or .jsonl with a "text" in each line.',
            show_default=False,
        ),
    ] = None,
    calib_samples: Annotated[int, typer.Option(help="Number of pieces of text to calibrate on.", min=1)] = 64,
    calib_length: Annotated[int, typer.Option(help="Length of each piece in tokens.", min=2)] = 512,
    group: Annotated[int, typer.Option(help="Inputs that share a scale: 128, 64 or 32; 0: all.")] = 128,
    zero_points: Annotated[
        bool, typer.Option("--zero-points", help="Give every scale a zero point, so that ranges need not be symmetric.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write to. Default: variants in the model's folder.", show_default=False),
    ] = None,
) -> None:
    """Quantise a model's layers and store them next to the model."""
    from jaxserve.calibration.pipeline import QuantizationSettings
    from jaxserve.calibration.run import CalibrationText, run
    from jaxserve.core.bundled import bundled_model_path

    chosen = tuple(dict.fromkeys(name.strip() for name in precisions.split(",") if name.strip()))
    settings = QuantizationSettings(chosen, method, group, symmetric=not zero_points)
    text = None if calib is None else CalibrationText(calib, calib_samples, calib_length)
    _print_sizes(run(model or bundled_model_path(), settings, text, out))


def _print_sizes(store: "VariantStore") -> None:
    """Print the bytes of one layer and of all layers in each precision."""
    from rich.table import Table

    table = Table("precision", "method", "bytes per layer", "bytes of all layers", title=str(store.path))
    for precision in store.precisions:
        sizes = [store.nbytes(index, precision) for index in range(store.num_layers)]
        each = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} - {max(sizes):,}"
        table.add_row(precision, store.method(precision).name, each, f"{sum(sizes):,}")
    console.print(table)
