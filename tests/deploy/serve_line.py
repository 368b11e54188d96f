"""What a file in deploy/ starts: the words of `jaxserve serve ...`, and the options that they mean."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
import yaml

from jaxserve.cli.main import app
from jaxserve.core.config import EngineConfig
from jaxserve.server.options import read_config, resolve
from jaxserve.server.settings import ServerSettings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MARGIN_S = 5  # between the end of a server that takes its time and the signal that kills it


def documents(path: Path) -> list[dict[str, Any]]:
    """Return the documents of a YAML file."""
    return list(yaml.safe_load_all(path.read_text()))


def options(words: Sequence[str], config: Path | None = None) -> tuple[EngineConfig, ServerSettings]:
    """Return what `jaxserve serve words...` serves. An option that does not exist fails the test."""
    command = typer.main.get_command(app).commands["serve"]
    given = command.make_context("serve", list(words)).params
    file = config or given.pop("config")
    chosen = {name: value for name, value in given.items() if value is not None and name != "config"}
    return resolve(read_config(file) if file else {}, chosen)


def longest_end(settings: ServerSettings) -> float:
    """Return the seconds after a SIGTERM within which a server has ended."""
    return settings.shutdown_delay + settings.shutdown_timeout
