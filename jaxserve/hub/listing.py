"""The list that a hub gives of a model: its commit, its files with their sizes, and its licence."""

import re
from dataclasses import dataclass

from huggingface_hub import HfApi, constants

from jaxserve.core.errors import CheckpointError
from jaxserve.hub.cache import COMMIT
from jaxserve.hub.names import HubName

LIBRARY = "jaxserve"
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository. `sha256`: the hash of its contents, None for a small file, which Git itself stores."""

    name: str
    size: int
    sha256: str | None


@dataclass(frozen=True)
class Listing:
    """One revision of a repository. `license`: what its card says, None if it says nothing."""

    commit: str
    files: dict[str, RemoteFile]
    license: str | None


def ask(name: HubName, token: str | None) -> Listing:
    """Ask the hub about a model, in one request. Raise the errors of the hub's client."""
    api = HfApi(token=token, library_name=LIBRARY)
    info = api.model_info(name.id, revision=name.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    if not COMMIT.fullmatch(str(info.sha)):
        raise CheckpointError(f"{constants.ENDPOINT} answers for {name} with {info.sha!r}, which is no commit")
    files = {
        file.rfilename: RemoteFile(file.rfilename, file.size or 0, _hash(file.lfs.sha256 if file.lfs else None))
        for file in info.siblings or ()
    }
    return Listing(str(info.sha), files, _license(info.card_data))


def _hash(text: str | None) -> str | None:
    """Return a hash, which becomes the name of a file; None for what is none."""
    return text if text is not None and SHA256.fullmatch(text) else None


def _license(card: object) -> str | None:
    """Return the licence that a model's card names. An own one has the identifier "other", and a name beside it."""
    found = getattr(card, "license", None)
    if found in (None, "other"):
        found = getattr(card, "license_name", None) or found
    if isinstance(found, list):
        found = ", ".join(map(str, found))
    return str(found) if found else None
