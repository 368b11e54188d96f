"""Readers of text, JSON and YAML files. Every error is one line that names the file."""

import json
import tempfile
from pathlib import Path
from typing import Any

from jaxserve.core.errors import CheckpointError, ConfigError


def read_text(path: str | Path, *, encoding: str = "utf-8") -> str:
    """Return a file's text. Raises `ConfigError` for a file that cannot be read or is in another encoding."""
    try:
        return Path(path).read_text(encoding=encoding)
    except (OSError, ValueError) as error:  # UnicodeError is a ValueError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"cannot read {path}: {reason}") from error


def parse_json(text: str, name: str | Path) -> Any:
    """Return the value of a JSON text. Raise `ConfigError`, which calls the text `name`, if it is malformed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not valid JSON: {error}") from error


def read_json_object(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file of a model's folder, {} for a missing file if `missing_ok`.

    Raise `CheckpointError` naming the file if it cannot be read or holds anything but a JSON object.
    """
    if missing_ok and not path.is_file():
        return {}
    try:
        value = parse_json(read_text(path), path)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def parse_yaml(text: str, name: str | Path) -> Any:
    """Return the value of a YAML text. Raise `ConfigError`, which calls the text `name`, if it is malformed."""
    import yaml  # slow, and commands import this module for --help too

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: of a date or a number, from its parts
        raise ConfigError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from error


def ensure_folder(folder: Path, option: str) -> None:
    """Make a folder for results before they are computed. Raises `ConfigError` if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {error.strerror or error} ({option})") from error


def ensure_file(file: Path, option: str) -> None:
    """Make the folder of a file that will be written. Raises `ConfigError` if the file cannot be written there."""
    if file.is_dir():
        raise ConfigError(f"cannot write {file}: it is a folder ({option})")
    ensure_folder(file.parent, option)
