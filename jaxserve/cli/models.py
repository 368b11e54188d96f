"""The commands `jaxserve pull` and `jaxserve models`: models from the hub, and those that are here."""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import Console

from jaxserve.cli.app import App, Group
from jaxserve.cli.terminal import configure_logging
from jaxserve.console.bars import console
from jaxserve.console.progress import amount, start_progress
from jaxserve.console.tables import print_table
from jaxserve.core.errors import CheckpointError, ConfigError
from jaxserve.core.files import read_json_object
from jaxserve.hub.names import HubName, hub_name

if TYPE_CHECKING:
    from jaxserve.hub.local_models import LocalModel

DOWNLOAD_DIR = "Folder in which models from the hub are kept. Default: HF_HUB_CACHE, or else the folder hub in HF_HOME."
SHORT = 8  # characters of a commit that are shown

DownloadDir = Annotated[Path | None, typer.Option(help=DOWNLOAD_DIR, show_default=False)]


class Models(Group):
    """The group `jaxserve models`."""

    others: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("list", "ls"), "jaxserve models"),
        **dict.fromkeys(("rm", "delete"), "jaxserve models remove NAME"),
        "pull": "jaxserve pull NAME",
    }


app = App(
    name="models",
    cls=Models,
    help="List the models from the hub that are on this machine, or remove some.",
    invoke_without_command=True,
    no_args_is_help=False,
)


def pull(
    models: Annotated[
        list[str], typer.Argument(help="Names on the hub: ORG/NAME or ORG/NAME@REVISION.", show_default=False)
    ],
    *,
    download_dir: DownloadDir = None,
) -> None:
    """Download models from the hub, or bring them up to date, and print their folders."""
    from jaxserve.checkpoint.configs import check_supported
    from jaxserve.hub import fetch

    configure_logging("warning")
    for name in [_parse_name(model) for model in models]:
        with start_progress(doing=f"asking for {name}") as progress:
            found = fetch(name, download_dir=download_dir, check=check_supported, progress=progress, latest=True)
        size = amount(sum(file.stat().st_size for file in found.folder.rglob("*") if file.is_file()), "B")
        licence = found.license or "unknown"
        console.print(
            f"{name}: {size}, licence {licence}, revision {found.commit[:SHORT]}", markup=False, soft_wrap=True
        )
        typer.echo(found.folder)


@app.callback()
def list_models(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
    download_dir: DownloadDir = None,
) -> None:
    """List the models from the hub that are on this machine, or remove some."""
    context.obj = download_dir
    if context.invoked_subcommand is not None:
        return
    from jaxserve.hub.cache import cache_folder
    from jaxserve.hub.local_models import broken_models, local_models

    configure_logging("error")  # what would be noted when a model is loaded
    cache = cache_folder(download_dir)
    rows = [Row.of(model) for model in local_models(cache)]
    if as_json:
        typer.echo(json.dumps([row.described() for row in rows], indent=2))
        return
    _print(rows, cache)
    for problem in broken_models(cache):
        console.print(f"left out: {problem}", markup=False, soft_wrap=True)


@app.command()
def remove(
    context: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(
            help="Names: ORG/NAME for all revisions, or ORG/NAME@REVISION, with a branch, a tag or the beginning of a "
            "commit.",
            show_default=False,
        ),
    ],
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    download_dir: DownloadDir = None,
) -> None:
    """Delete models from the hub that are on this machine."""
    from jaxserve.hub.cache import cache_folder
    from jaxserve.hub.local_models import chosen_models, remove as delete

    cache = cache_folder(download_dir or context.obj)
    chosen = {name: chosen_models(name, cache) for name in map(_parse_name, models)}
    for name, found in chosen.items():
        revisions = ", ".join(model.commit[:SHORT] for model in found)
        console.print(f"{name}: revision {revisions}, {amount(_size(found), 'B')}", markup=False, soft_wrap=True)
    if not yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise ConfigError("nothing was deleted: give --yes to delete without being asked")
        if not typer.confirm("delete?", err=True):
            raise typer.Exit(1)
    freed = sum(delete(found, cache) for found in chosen.values())
    console.print(f"{amount(freed, 'B')} freed in {cache}", markup=False, soft_wrap=True)


def _parse_name(text: str) -> HubName:
    name = hub_name(text)
    if name is None:
        raise ConfigError(f"{text} is no name on a hub: give ORG/NAME or ORG/NAME@REVISION")
    return name


def _size(models: "Iterable[LocalModel]") -> int:
    """Return the bytes of revisions, which may share some files."""
    files = {path.resolve() for model in models for path in model.folder.rglob("*") if path.is_file()}
    return sum(path.stat().st_size for path in files)


@dataclass(frozen=True)
class Row:
    """A model in the list. `obstacle`: why it cannot be served, "" if it can."""

    model: "LocalModel"
    architecture: str
    precision: str
    obstacle: str

    @classmethod
    def of(cls, model: "LocalModel") -> "Row":
        """Describe a model by its config.json."""
        from jaxserve.checkpoint.configs import check_supported

        try:
            config = read_json_object(model.folder / "config.json")
            check_supported(model.folder)
            obstacle = f"not complete: {model.missing[0]} is missing" if model.missing else ""
        except CheckpointError as error:
            config = {} if "config.json" in model.missing else _config(model.folder)
            obstacle = str(error).removeprefix(f"{model.folder / 'config.json'}: ").removeprefix("cannot read ")
        return cls(model, _architecture(config), _precision(config), obstacle)

    def cells(self) -> tuple[str, ...]:
        """Return the model for the table."""
        model = self.model
        return (
            model.id,
            ", ".join(model.branches) or model.commit[:SHORT],
            amount(model.size, "B"),
            f"{self.architecture.removesuffix('ForCausalLM')} {self.precision}".strip(),
            _ago(datetime.now().astimezone(), model.last_used),
        )

    def described(self) -> dict[str, Any]:
        """Return the model for the list as JSON."""
        model = self.model
        return {
            "id": model.id,
            "commit": model.commit,
            "branches": list(model.branches),
            "folder": str(model.folder),
            "bytes": model.size,
            "architecture": self.architecture,
            "precision": self.precision,
            "last_used": model.last_used.isoformat(timespec="seconds"),
            "supported": not self.obstacle,
            "reason": self.obstacle or None,
        }


def _config(folder: Path) -> dict[str, Any]:
    try:
        return read_json_object(folder / "config.json", missing_ok=True)
    except CheckpointError:
        return {}


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0] if isinstance(names, list) and names else config.get("model_type", ""))


def _precision(config: dict[str, Any]) -> str:
    quantised = config.get("quantization_config")
    if isinstance(quantised, dict):
        bits = quantised.get("bits") or quantised.get("w_bit")
        return " ".join(filter(None, (str(quantised.get("quant_method", "")), f"int{bits}" if bits else "")))
    return str(config.get("torch_dtype") or config.get("dtype") or "")


def _print(rows: list[Row], cache: Path) -> None:
    """Print the list as a table, and below it why some of the models cannot be served."""
    if not rows:
        console.print(f"no models in {cache}: `jaxserve pull ORG/NAME` downloads one", markup=False, soft_wrap=True)
        return
    columns = ("model", "revision", "size", "weights", "last used")
    print_table(columns, [row.cells() for row in rows], Console(highlight=False), title=f"models in {cache}")
    for row in rows:
        if row.obstacle:
            console.print(
                f"{row.model.id}@{row.model.commit[:SHORT]}: {row.obstacle}", markup=False, soft_wrap=True, style="dim"
            )


def _ago(now: datetime, then: datetime) -> str:
    """Return how long ago something was, in words."""
    days = (now.date() - then.date()).days
    return "today" if days <= 0 else "yesterday" if days == 1 else f"{days} days ago"
