"""Where results go: to the file or folder that was asked for, and to the terminal."""

from typing import Any

from jaxserve.bench.options import LoadOptions, ResultOptions
from jaxserve.bench.result import ensure_writable, label, save
from jaxserve.bench.table import print_result
from jaxserve.terminal import console


def prepare(options: ResultOptions) -> None:
    """Raises `ConfigError` where a result could not be saved."""
    if path := options.destination():
        ensure_writable(path.parent if path.suffix == ".json" else path)


def publish(measured: dict[str, Any], options: ResultOptions, load: LoadOptions | None = None) -> None:
    """Saves a result if asked to, to a file or a folder, and prints it, even if it could not be saved."""
    load = load or LoadOptions()
    try:
        if path := options.destination():
            if path.suffix != ".json":
                path = path / f"{label(measured).replace('/', '-')}-{measured['date']}.json"
            save(measured, path)
            console.print(f"saved {path}", markup=False, soft_wrap=True)
    finally:
        print_result(measured, metrics=load.metrics(), percentiles=load.percentiles())
