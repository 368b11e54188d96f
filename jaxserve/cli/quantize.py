"""`jaxserve quantize`: the command. What it does is imported when it runs, so that --help is fast."""

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
        typer.Argument(help="Folder in Hugging Face layout; default: the bundled model.", show_default=False),
    ] = None,
    *,
    precisions: Annotated[str, typer.Option(help="Any of int8, int4 and int3, with commas.")] = "int8,int4,int3",
    method: Annotated[
        Literal["awq", "gptq", "rtn"],
        typer.Option(help="Activation-aware scaling, error compensation, or rounding to the nearest."),
    ] = "awq",
    calib: Annotated[
        Path | None,
        typer.Option(help="Text file, or .jsonl with a text per line, for awq and gptq.", show_default=False),
    ] = None,
    calib_samples: Annotated[int, typer.Option(help="Pieces of text to calibrate on.", min=1)] = 64,
    calib_length: Annotated[int, typer.Option(help="Tokens of each piece.", min=2)] = 512,
    group: Annotated[int, typer.Option(help="Inputs that share a scale: 128, 64, 32; 0: all.")] = 128,
    zero_points: Annotated[bool, typer.Option("--zero-points", help="Ranges that need not be symmetric.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the variants; default: variants in the model's.", show_default=False)
    ] = None,
) -> None:
    """Prepare a model's layers in fewer bits, beside the model."""
    from jaxserve.calibration.pipeline import Settings
    from jaxserve.calibration.run import CalibrationText, run
    from jaxserve.core.bundled import bundled_model_path

    chosen = tuple(dict.fromkeys(name.strip() for name in precisions.split(",") if name.strip()))
    settings = Settings(chosen, method, group, symmetric=not zero_points)
    text = None if calib is None else CalibrationText(calib, calib_samples, calib_length)
    _print_sizes(run(model or bundled_model_path(), settings, text, out))


def _print_sizes(store: "VariantStore") -> None:
    """Bytes by precision: of one layer, and of all."""
    from rich.table import Table

    table = Table("precision", "method", "bytes per layer", "bytes of all layers", title=str(store.path))
    for precision in store.precisions:
        sizes = [store.nbytes(index, precision) for index in range(store.num_layers)]
        each = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} - {max(sizes):,}"
        table.add_row(precision, store.method(precision).name, each, f"{sum(sizes):,}")
    console.print(table)
