"""Names of models, derived from their folders."""

import os
from pathlib import Path


def model_name(path: Path) -> str:
    """Return the name of a model's folder, or of its repository if the folder is in Hugging Face's cache.

    A folder `.../models--org--name/snapshots/<commit>` in the cache has the name `org/name`.
    """
    folder = path.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return os.fsencode(folder.name).decode(errors="replace")  # clients get it as JSON
