"""The folder of a model that is given by its name on a hub: from the cache, or else downloaded."""

import logging
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.console.progress import amount
from jaxserve.core.errors import CheckpointError, ConfigError, JaxserveError
from jaxserve.core.model_files import about_other_weights
from jaxserve.core.progress import DOWNLOADING, Progress, ignore_progress
from jaxserve.hub.cache import Repository, cache_folder, indexed_files
from jaxserve.hub.names import HubName
from jaxserve.hub.selection import CONFIG, VOCABULARIES, Need, small_files, weight_files

if TYPE_CHECKING:
    from jaxserve.hub.listing import Listing, RemoteFile

log = logging.getLogger(__name__)

DISK_MARGIN = 64 << 20  # bytes that stay free
Check = Callable[[Path], object]
"""A function that raises `CheckpointError` for a folder with a config.json that is not supported."""


@dataclass(frozen=True)
class Fetched:
    """A model in the cache. `license`: what the hub says, None if that is nothing or the hub was not asked."""

    folder: Path
    commit: str
    license: str | None = None


def fetch(
    name: HubName,
    need: Need = Need.ALL,
    *,
    download_dir: str | Path | None = None,
    token: str | None = None,
    check: Check = lambda folder: None,
    progress: Progress = ignore_progress,
    latest: bool = False,
) -> Fetched:
    """Return a model in the cache, and download what the cache lacks.

    If it has all that is needed, no request is made, unless `latest` asks whether the revision is another commit now.
    `check` sees the configuration before the weights are downloaded. `token`: of the hub; None: that of its client
    (HF_TOKEN, or of `hf auth login`).

    Raise `CheckpointError` for a model that cannot be had or used, `ConfigError` if the cache has no room for it or
    cannot be written to.
    """
    repository = Repository(name, cache_folder(download_dir))
    commit = None if latest else repository.commit()
    missing = [CONFIG] if commit is None else repository.missing(commit, need)
    if commit is not None and not missing:
        return Fetched(repository.snapshot(commit), commit)
    # Imported late: it takes a third of a second, and only downloads need it.
    from jaxserve.hub.errors import Unreachable, explained
    from jaxserve.hub.listing import ask

    try:
        listing = ask(name, token)
    except Exception as raised:
        error = explained(raised, name, repository.cache)
        if not isinstance(error, Unreachable):
            raise error from raised
        if latest:
            raise CheckpointError(f"{name} cannot be downloaded: {error}") from raised
        if commit is not None and missing == [VOCABULARIES[0]]:  # which the repository may not have
            return Fetched(repository.snapshot(commit), commit)
        raise _absent(repository, commit, missing, error) from raised
    try:
        _download(repository, listing, need, token, check, progress)
    except Exception as raised:
        error = explained(raised, name, repository.cache)
        if isinstance(error, Unreachable):
            error = CheckpointError(f"{error}: what has come of {name} is kept, `jaxserve pull {name}` gets the rest")
        raise error from raised
    return Fetched(repository.snapshot(listing.commit), listing.commit, listing.license)


def _download(
    repository: Repository, listing: "Listing", need: Need, token: str | None, check: Check, progress: Progress
) -> None:
    """Download what is needed of a listed repository, the weights last."""
    from jaxserve.hub.transfer import download_large, download_small

    name, commit = repository.name, listing.commit
    if lacking := _lacking(name, listing.files, need):
        raise CheckpointError(lacking)
    snapshot = repository.snapshot(commit)
    download_small(repository, commit, small_files(listing.files, need), token)
    try:
        check(snapshot)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {str(error).removeprefix(f'{snapshot}/')}") from error
    if need is Need.ALL:
        names = weight_files(listing.files, indexed_files(snapshot))
        if absent := [file for file in names if file not in listing.files]:
            raise CheckpointError(f"{name} has no {absent[0]}, though its index names it")
        files = [listing.files[file] for file in names if not (snapshot / file).is_file()]
        if files:
            _announce(repository, listing, files)
            _check_room(repository, files)
            what = f"{DOWNLOADING} {name} (licence {listing.license or 'unknown'})"
            total = sum(file.size for file in files)
            download_large(repository, commit, files, token, lambda done: progress(what, done, total))
    repository.remember(commit)


def _announce(repository: Repository, listing: "Listing", files: Sequence["RemoteFile"]) -> None:
    count = f"{len(files)} files" if len(files) > 1 else files[0].name
    log.info(
        "downloading %s: %s in %s, licence %s, revision %s, to %s",
        repository.name,
        amount(sum(file.size for file in files), "B"),
        count,
        listing.license or "unknown",
        listing.commit[:8],
        repository.folder,
    )


def _check_room(repository: Repository, files: Sequence["RemoteFile"]) -> None:
    """Raise `ConfigError` if the disk has no room for the rest of these files."""
    from jaxserve.hub.errors import OTHER_FOLDER
    from jaxserve.hub.transfer import present_bytes

    needed = sum(file.size - present_bytes(repository, file) for file in files)
    free = shutil.disk_usage(repository.folder).free
    if needed + DISK_MARGIN > free:
        raise ConfigError(
            f"{repository.name} takes {amount(needed, 'B')} more, and {repository.cache} has {amount(free, 'B')} "
            f"free: make room (`jaxserve models` lists what is there), or {OTHER_FOLDER}"
        )


def _lacking(name: HubName, files: Collection[str], need: Need) -> str:
    """Return why a repository with these files cannot be used, "" if it can."""
    if need is Need.TOKENIZER:
        return "" if set(VOCABULARIES) & set(files) else f"{name} has no {' or '.join(VOCABULARIES)}"
    if CONFIG in files and (need is not Need.ALL or weight_files(files, None)):
        return ""
    others = about_other_weights([file for file in files if "/" not in file])
    what = "safetensors" if CONFIG in files else CONFIG
    return f"{name} has no {what}, and nothing was downloaded" + (f": {others}" if others else "")


def _absent(
    repository: Repository, commit: str | None, missing: Sequence[str], reason: JaxserveError
) -> CheckpointError:
    """Return the error for a model that is not in the cache, or not all of it, when the hub cannot be asked."""
    name = repository.name
    if commit is None:
        what = f"{name}: no such directory, and not in the cache {repository.cache}"
    else:
        more = f" and {len(missing) - 1} more files are" if len(missing) > 1 else " is"
        what = f"{name}: {missing[0]}{more} missing in the cache {repository.cache}"
    return CheckpointError(f"{what}; {reason}: `jaxserve pull {name}` downloads it where there is a network")
