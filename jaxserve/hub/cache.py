"""The local cache of models, in the layout of the hub's client. Nothing here makes a request.

models--org--name/refs/main            the commit that the branch main was when it was downloaded
models--org--name/snapshots/<commit>/  the files, as links
models--org--name/blobs/<hash>         their contents; <hash>.incomplete while one is being downloaded
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from jaxserve.core.errors import CheckpointError
from jaxserve.core.files import read_json_object, replace_file
from jaxserve.core.model_files import INDEX_NAME, SINGLE_NAME
from jaxserve.hub.names import HubName
from jaxserve.hub.selection import CONFIG, VOCABULARIES, Need, missing_weights, small_files, weight_files

COMMIT = re.compile(r"[0-9a-f]{40}")
SHORT_COMMIT = re.compile(r"[0-9a-f]{7,39}")
MAIN = "main"


@dataclass(frozen=True)
class Repository:
    """A model's folder in the cache, which may not exist."""

    name: HubName
    cache: Path

    @property
    def folder(self) -> Path:
        """The folder with everything that is known of the model."""
        return self.cache / f"models--{self.name.id.replace('/', '--')}"

    @property
    def blobs(self) -> Path:
        """The folder with the contents of all files."""
        return self.folder / "blobs"

    @property
    def locks(self) -> Path:
        """The folder with the locks under which files are downloaded."""
        return self.cache / ".locks" / self.folder.name

    def snapshot(self, commit: str) -> Path:
        """Return the folder with the files of a commit."""
        return self.folder / "snapshots" / commit

    def commit(self) -> str | None:
        """Return the commit that the revision is here, None if that is unknown."""
        revision = self.name.revision or MAIN
        if COMMIT.fullmatch(revision):
            return revision
        try:
            return (self.folder / "refs" / revision).read_text().strip()
        except (OSError, ValueError):
            pass
        if SHORT_COMMIT.fullmatch(revision):
            found = [path.name for path in (self.folder / "snapshots").glob(f"{revision}*")]
            return found[0] if len(found) == 1 else None
        return None

    def remember(self, commit: str) -> None:
        """Note that the revision is a commit, whose files are complete. Raise OSError if that cannot be written."""
        revision = self.name.revision or MAIN
        if not commit.startswith(revision):
            path = self.folder / "refs" / revision
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, commit.encode())

    def missing(self, commit: str, need: Need) -> list[str]:
        """Return the needed files that a snapshot lacks: by the list of the repository's files, if the cache has it.

        Otherwise by what is there: config.json, a vocabulary, and the weights that the index names.
        """
        snapshot, listed = self.snapshot(commit), self._listed(commit)
        if need is not Need.TOKENIZER and not (snapshot / CONFIG).is_file():
            return [CONFIG]
        if need is Need.CONFIG:
            return []
        indexed = indexed_files(snapshot)
        if listed is not None:
            wanted = small_files(listed, need)
            if need is Need.ALL:
                wanted += weight_files(listed, indexed) or [SINGLE_NAME]
            return [name for name in wanted if not (snapshot / name).is_file()]
        present = {path.name for path in snapshot.glob("*") if path.is_file()}
        missing = [] if present.intersection(VOCABULARIES) else [VOCABULARIES[0]]
        return missing + (missing_weights(present, indexed) if need is Need.ALL else [])

    def _listed(self, commit: str) -> list[str] | None:
        """Return the names of all files of a commit, which newer versions of the hub's client keep."""
        try:
            files = json.loads((self.folder / "trees" / f"{commit}.json").read_text())["files"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return list(files) if isinstance(files, dict) and files else None


def cache_folder(download_dir: str | Path | None) -> Path:
    """Return the folder of the cache: `download_dir`, or else HF_HUB_CACHE or the folder hub in HF_HOME."""
    from huggingface_hub import constants

    return Path(os.path.expanduser(download_dir or constants.HF_HUB_CACHE)).absolute()


def indexed_files(snapshot: Path) -> list[str] | None:
    """Return the names of the shards that a snapshot's index names, None without an index that can be read."""
    try:
        shards = read_json_object(snapshot / INDEX_NAME)["weight_map"]
        return sorted(set(map(str, shards.values())))
    except (CheckpointError, KeyError, AttributeError):
        return None
