"""Names of models on a hub, such as Qwen/Qwen2.5-0.5B-Instruct@main, told apart from paths."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from jaxserve.core.errors import ConfigError

PART = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?"
ID = re.compile(rf"{PART}(?:/{PART})?")
REVISION = re.compile(r"\w[\w./-]*")
MAX_ID = 96  # characters, the hub's limit
# Endings of files: a name with one of these is a path even if the file does not exist.
FILES = (".json", ".yaml", ".yml", ".safetensors", ".gguf", ".model", ".bin", ".pt", ".git")


@dataclass(frozen=True)
class HubName:
    """The name of a model on a hub, and its revision: a branch, a tag or a commit. None: the branch main."""

    id: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"


def hub_name(source: str | Path, revision: str | None = None, *, short: bool = False) -> HubName | None:
    """Return the name on a hub that a text is, or None if it is a path.

    What exists is always a path, and so is a `Path`, and a text that begins with ".", "/" or "~". A name has an
    organisation, as in ORG/NAME, unless `short` allows one without. `revision` is the option of that name. Raise
    `ConfigError` if there are two revisions, or one of a path.
    """
    name = None if isinstance(source, Path) or os.path.exists(source) else _parse(source)
    if name is not None and "/" not in name.id and not short:
        name = None
    if revision is None:
        return name
    if name is None:
        raise ConfigError(f"revision is {revision!r}, but {source} is a path: only models on a hub have revisions")
    if name.revision not in (None, revision):
        raise ConfigError(f"revision is {revision!r}, but the model is {name}: give one revision")
    if not _is_revision(revision):
        raise ConfigError(f"revision is {revision!r}: it must be a branch, a tag or a commit (--revision)")
    return HubName(name.id, revision)


def _parse(text: str) -> HubName | None:
    model, at, revision = text.partition("@")
    if not ID.fullmatch(model) or len(model) > MAX_ID or "--" in model or ".." in model or model.endswith(FILES):
        return None
    if not at:
        return HubName(model)
    return HubName(model, revision) if _is_revision(revision) else None


def _is_revision(text: str) -> bool:
    return REVISION.fullmatch(text) is not None and ".." not in text
