"""The name of a model by the folder that it is in."""

from pathlib import Path


def model_name(path: Path) -> str:
    """Return the folder's name, or the repository's where the folder is a snapshot in Hugging Face's cache.

    There it is `.../models--org--name/snapshots/<commit>`, which stands for `org/name`.
    """
    folder = path.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return folder.name
