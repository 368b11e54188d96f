"""Files that come with jaxserve: the bundled model, and the configuration files in configs/.

A wheel holds them inside the package, where setup.py copies them. A source tree, which an editable install imports
from, has them at the top of the repository.
"""

import os
from importlib.resources import files
from pathlib import Path

from jaxserve.core.errors import CheckpointError, ConfigError

_PACKAGE = Path(str(files("jaxserve")))
_MODEL_FOLDERS = (_PACKAGE / "_bundled", _PACKAGE.parent / "checkpoints")
_CONFIG_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")


def bundled_model_path() -> Path:
    """Return the directory of the bundled model, in Hugging Face layout.

    Raise `CheckpointError` if this installation has no bundled model.
    """
    for folder in _MODEL_FOLDERS:
        for config in sorted(folder.glob("*/config.json")):
            return config.parent
    raise CheckpointError(
        f"this installation has no bundled model: no */config.json in {' or '.join(map(str, _MODEL_FOLDERS))}"
    )


def configs_path(kind: str) -> Path:
    """Return the folder of configs/ for a kind of file: "hardware", "models", "policies" or "serve".

    Raise `ConfigError` if this installation has no such folder.
    """
    for folder in _CONFIG_FOLDERS:
        if (folder / kind).is_dir():
            return folder / kind
    raise ConfigError(f"this installation has no configs/{kind}: looked in {' and '.join(map(str, _CONFIG_FOLDERS))}")


def config_names(kind: str) -> list[str]:
    """Return the names of the files of one kind in configs/, sorted and without suffixes."""
    return sorted(file.stem for file in configs_path(kind).iterdir() if file.is_file())


def config_path(kind: str, path_or_name: str | Path) -> Path | None:
    """Return the file at a path, or else the file in configs/`kind` with that name, or None if neither exists."""
    # Path.is_file would raise for a name that is too long.
    if os.path.isfile(path_or_name):
        return Path(path_or_name)
    known = (file for file in configs_path(kind).iterdir() if file.stem == str(path_or_name))
    return next(known, None)
