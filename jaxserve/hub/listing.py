"""What a hub says about a model: its commit, its files with their sizes, and its licence."""

from dataclasses import dataclass

from huggingface_hub import HfApi, constants

from jaxserve.hub.names import HubName

LIBRARY = "jaxserve"


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
    files = {
        file.rfilename: RemoteFile(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else None)
        for file in info.siblings or ()
    }
    return Listing(str(info.sha), files, _license(info.card_data))


def _license(card: object) -> str | None:
    """Return the licence that a model's card names. An own one has the identifier "other", and a name beside it."""
    found = getattr(card, "license", None)
    if found in (None, "other"):
        found = getattr(card, "license_name", None) or found
    if isinstance(found, list):
        found = ", ".join(map(str, found))
    return str(found) if found else None
