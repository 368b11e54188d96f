"""Output of results: to the requested file or folder, and to the terminal."""

from itertools import count
from pathlib import Path
from typing import Any

from jaxserve.bench.options import LoadOptions, ResultOptions
from jaxserve.bench.result import label, save
from jaxserve.bench.table import print_result
from jaxserve.console.bars import console
from jaxserve.core.files import ensure_file, ensure_folder

# File systems limit a name to 255 bytes, and a character takes up to 4.
MAX_NAME_LENGTH = 60


def check_destination(options: ResultOptions) -> None:
    """Raise `ConfigError` if a result could not be saved where the options say."""
    if path := options.destination():
        ensure = ensure_file if path.suffix == ".json" else ensure_folder
        ensure(path, "--save-result")


def publish(measured: dict[str, Any], options: ResultOptions, load: LoadOptions | None = None) -> None:
    """Save a result if the options name a file or a folder, and print it even if saving fails."""
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
    """Return an unused path in a folder, even for two runs that end in the same second. A long name keeps its end."""
    safe = "".join(c if c.isprintable() and c not in "/\\" else "-" for c in name)[-MAX_NAME_LENGTH:].lstrip(".")
    names = (f"{safe}.json" if number == 1 else f"{safe}-{number}.json" for number in count(1))
    return next(path for path in (folder / name for name in names) if not path.exists())
