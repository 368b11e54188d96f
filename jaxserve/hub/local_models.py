"""The models in the local cache: a list of them, and their removal."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from huggingface_hub import CacheNotFound, HFCacheInfo, scan_cache_dir

from jaxserve.core.errors import ConfigError
from jaxserve.hub.cache import Repository
from jaxserve.hub.names import HubName
from jaxserve.hub.selection import Need


@dataclass(frozen=True)
class LocalModel:
    """One revision of a model in the cache."""

    id: str
    commit: str
    branches: tuple[str, ...]  # and tags, that were this commit when it was downloaded
    folder: Path
    size: int  # bytes of its files, of which revisions may share some
    last_used: datetime  # when the system last noted that a file was read
    missing: tuple[str, ...]  # files that are needed, and were not downloaded

    def is_revision(self, revision: str) -> bool:
        """Return whether a branch, a tag, a commit or its beginning names this revision."""
        return revision in self.branches or (len(revision) >= 7 and self.commit.startswith(revision))


def local_models(cache: Path) -> list[LocalModel]:
    """Return all models in a cache, in the order of their names."""
    info = _scan(cache)
    found = [
        LocalModel(
            repo.repo_id,
            revision.commit_hash,
            tuple(sorted(revision.refs)),
            revision.snapshot_path,
            revision.size_on_disk,
            datetime.fromtimestamp(max((file.blob_last_accessed for file in revision.files), default=0)).astimezone(),
            tuple(Repository(HubName(repo.repo_id), cache).missing(revision.commit_hash, Need.ALL)),
        )
        for repo in (info.repos if info else ())
        if repo.repo_type == "model"
        for revision in repo.revisions
    ]
    return sorted(found, key=lambda model: (model.id.lower(), model.commit))


def broken_models(cache: Path) -> list[str]:
    """Return what is wrong with folders in a cache that are no models, a sentence each."""
    info = _scan(cache)
    return [str(warning).partition("\n")[0] for warning in (info.warnings if info else ())]


def chosen_models(name: HubName, cache: Path) -> list[LocalModel]:
    """Return the revisions in a cache that a name means: all, if it has no revision. Raise `ConfigError` if none."""
    of_id = [model for model in local_models(cache) if model.id == name.id]
    chosen = [model for model in of_id if name.revision is None or model.is_revision(name.revision)]
    if not chosen:
        known = ", ".join(sorted({branch for model in of_id for branch in (*model.branches, model.commit[:8])}))
        raise ConfigError(
            f"{name} is not in the cache {cache}" + (f", which has the revisions {known}" if known else "")
        )
    return chosen


def remove(models: Sequence[LocalModel], cache: Path) -> int:
    """Delete revisions of one model, with what no other revision needs, and return the bytes that this frees."""
    info = _scan(cache)
    assert info is not None, "the cache has models"
    strategy = info.delete_revisions(*(model.commit for model in models))
    unfinished = [path for repo in strategy.repos for path in repo.glob("blobs/*.incomplete")]
    freed = strategy.expected_freed_size + sum(path.stat().st_size for path in unfinished)
    strategy.execute()
    left = [model.folder for model in models if model.folder.exists()]
    if left:
        raise ConfigError(f"cannot delete {left[0]}: check its permissions (you are user {os.getuid()})")
    return freed


def _scan(cache: Path) -> HFCacheInfo | None:
    try:
        return scan_cache_dir(cache)
    except CacheNotFound:
        return None
