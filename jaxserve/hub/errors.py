"""Errors of the hub and of downloads, in one line that says what helps."""

import errno
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from jaxserve.core.errors import CheckpointError, ConfigError, JaxserveError
from jaxserve.hub.names import HubName

NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
FULL = (errno.ENOSPC, errno.EDQUOT)
# Packages whose errors are of connections, or of answers that no hub would give.
NETWORK = ("huggingface_hub", "httpx2", "httpcore2", "httpx", "httpcore", "requests", "urllib3", "json")
OTHER_FOLDER = "choose another folder with --download-dir or HF_HOME"


class Unreachable(CheckpointError):
    """A hub that does not answer, so that only the cache is left."""


def explained(error: Exception, name: HubName, cache: Path) -> JaxserveError:
    """Return the error to raise for one of the hub's client, or of a file. Raise any other error as it is."""
    hub = constants.ENDPOINT
    page = f"{hub}/{name.id}"
    if isinstance(error, JaxserveError):
        return error
    if isinstance(error, GatedRepoError):
        return CheckpointError(
            f"{name.id} is gated: accept its terms at {page}, and set HF_TOKEN to a token of that account"
        )
    status = getattr(error.response, "status_code", None) if isinstance(error, HfHubHTTPError) else None
    if status == 401 and "Invalid credentials" in str(error):
        return CheckpointError(f"{hub} refuses the token: set HF_TOKEN to a valid one, or unset it")
    if isinstance(error, RepositoryNotFoundError) or status == 401:  # which hides whether a model is private
        return CheckpointError(
            f"{name.id}: no such directory, and no such model on {hub} (for a private one, set HF_TOKEN)"
        )
    if isinstance(error, RevisionNotFoundError):
        return CheckpointError(f"{name.id} has no revision {name.revision!r}: its branches are at {page}/tree/main")
    if isinstance(error, DisabledRepoError):
        return CheckpointError(f"{name.id} is disabled by the hub: see {page}")
    if status is not None:
        return Unreachable(f"{hub} answers {status} for {name.id}")
    if isinstance(error, OfflineModeIsEnabled):
        return Unreachable("HF_HUB_OFFLINE is set")
    if isinstance(error, OSError) and error.errno in FULL:
        return ConfigError(f"the disk is full: {cache} has no room for {name.id}: {OTHER_FOLDER}")
    if isinstance(error, OSError) and error.errno in NOT_WRITABLE:
        return ConfigError(f"cannot write into {cache}: {error.strerror}: {OTHER_FOLDER}")
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in NETWORK:
        return Unreachable(f"{hub} cannot be reached ({_cause(error)})")
    raise error


def _cause(error: BaseException) -> str:
    """Return in a few words where an error began, such as "Connection refused"."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().partition("\n")[0] or type(error).__name__
