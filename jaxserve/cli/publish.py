"""Where results go: to the file or folder that was asked for, and to the terminal."""

from itertools import count
from pathlib import Path
from typing import Any

from jaxserve.bench.options import LoadOptions, ResultOptions
from jaxserve.bench.result import label, save
from jaxserve.bench.table import print_result
from jaxserve.cli.terminal import console
from jaxserve.core.files import ensure_file, ensure_folder

MAX_NAME_LENGTH = 60  # characters, each of 4 bytes at most, and the file systems' limit is 255 bytes


def prepare(options: ResultOptions) -> None:
    """Raises `ConfigError` where a result could not be saved."""
    if path := options.destination():
        ensure = ensure_file if path.suffix == ".json" else ensure_folder
        ensure(path, "--save-result")


def publish(measured: dict[str, Any], options: ResultOptions, load: LoadOptions | None = None) -> None:
    """Saves a result if asked to, to a file or a folder, and prints it, even if it could not be saved."""
    load = load or LoadOptions()
    try:
        if path := options.destination():
            if path.suffix != ".json":
                path = _new_file(path, f"{label(measured)}-{measured['date']}")
            save(measured, path)
            console.print(f"saved {path}", markup=False, soft_wrap=True)
    finally:
        print_result(measured, metrics=load.metrics(), percentiles=load.percentiles())


def _new_file(folder: Path, name: str) -> Path:
    """A file that is not there yet, also where two runs end in one second; a long name keeps its end."""
    safe = "".join(c if c.isprintable() and c not in "/\\" else "-" for c in name)[-MAX_NAME_LENGTH:].lstrip(".")
    names = (f"{safe}.json" if number == 1 else f"{safe}-{number}.json" for number in count(1))
    return next(path for path in (folder / name for name in names) if not path.exists())
