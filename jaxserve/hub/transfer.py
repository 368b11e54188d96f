"""Downloads of files into the cache. A large file that was interrupted goes on where it stopped, also by another start.

The hub's client downloads small files. It would begin an interrupted file again, so that the large ones are requested
here: into `blobs/<sha256>.incomplete`, under the client's own lock, and checked against their hash when complete.
"""

import contextlib
import glob
import hashlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_url, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    WeakFileLock,
    are_progress_bars_disabled,
    build_hf_headers,
    disable_progress_bars,
    enable_progress_bars,
)

from jaxserve.core.errors import CheckpointError
from jaxserve.hub.cache import Repository
from jaxserve.hub.listing import LIBRARY, RemoteFile

PARALLEL = 4  # files at once
MAX_FRUITLESS = 2  # attempts in a row that bring nothing, each of which the hub's client has repeated itself
PAUSE_S = 1.0  # between attempts
POLL_S = 0.2
MAX_BYTES = 50_000_000_000  # of a file that hubs send over plain HTTP
Report = Callable[[int], None]
"""A function that is called with the bytes that are there."""


def download_small(repository: Repository, commit: str, names: Sequence[str], token: str | None) -> None:
    """Download files, or link those that are already in the cache. Raise the errors of the hub's client."""
    with _no_bars():
        snapshot_download(
            repository.name.id,
            revision=commit,
            cache_dir=repository.cache,
            allow_patterns=[glob.escape(name) for name in names],
            token=token,
            library_name=LIBRARY,
        )


def download_large(
    repository: Repository, commit: str, files: Sequence[RemoteFile], token: str | None, report: Report
) -> None:
    """Download files with their own hashes, several at once, and link them all.

    Raise the first error, `CheckpointError` if a file's contents are not what its hash says. What has come stays, and
    is not requested again. An exception in `report` or a Ctrl-C ends the download.
    """
    large = [file for file in files if file.sha256 is not None and file.size <= MAX_BYTES]
    repository.blobs.mkdir(parents=True, exist_ok=True)
    repository.locks.mkdir(parents=True, exist_ok=True)
    transfer = _Transfer(repository, commit, token, large)
    with _no_bars():
        transfer.run(report)
    download_small(repository, commit, [file.name for file in files], token)


def present_bytes(repository: Repository, file: RemoteFile) -> int:
    """Return how much of a file is in the cache."""
    if file.sha256 is None:
        return 0
    for path in (repository.blobs / file.sha256, _partial(repository, file)):
        with contextlib.suppress(OSError):
            return min(path.stat().st_size, file.size)
    return 0


def _partial(repository: Repository, file: RemoteFile) -> Path:
    return repository.blobs / f"{file.sha256}.incomplete"


class _Stopped(Exception):
    """The end of a transfer because another one failed, or nobody waits for it any more."""


class _Transfer:
    """The download of several files by threads, which end soon after the thread that waits for them."""

    def __init__(self, repository: Repository, commit: str, token: str | None, files: Sequence[RemoteFile]):
        self._repository, self._commit, self._files = repository, commit, files
        self._headers: dict[str, str] = build_hf_headers(token=token, library_name=LIBRARY)
        self._stop = threading.Event()
        self._waiting: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
        self._errors: list[Exception] = []

    def run(self, report: Report) -> None:
        for file in self._files:
            self._waiting.put(file)
        # Daemons: a thread that waits for the network does not keep the process from ending.
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(min(PARALLEL, len(self._files)))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(POLL_S)
                    report(sum(present_bytes(self._repository, file) for file in self._files))
        finally:
            self._stop.set()
        if self._errors:
            raise self._errors[0]

    def _work(self) -> None:
        with contextlib.suppress(queue.Empty, _Stopped):
            while not self._stop.is_set():
                file = self._waiting.get_nowait()
                try:
                    self._fetch(file)
                except _Stopped:
                    raise
                except Exception as error:
                    self._errors.append(error)
                    self._stop.set()

    def _fetch(self, file: RemoteFile) -> None:
        blob, partial = self._repository.blobs / str(file.sha256), _partial(self._repository, file)
        with WeakFileLock(self._repository.locks / f"{file.sha256}.lock"):
            if blob.exists():  # another process has downloaded it
                return
            self._receive(file, partial)
            with partial.open("rb") as stored:
                found = hashlib.file_digest(stored, "sha256").hexdigest()
            if found != file.sha256:
                partial.unlink()
                raise CheckpointError(
                    f"{file.name} of {self._repository.name} is damaged: it is not what the hub's hash says. It was "
                    "deleted: try again"
                )
            partial.replace(blob)

    def _receive(self, file: RemoteFile, partial: Path) -> None:
        """Append to a file until it is complete. Broken connections are repeated as long as they bring something."""
        url = hf_hub_url(self._repository.name.id, file.name, revision=self._commit)
        fruitless = 0
        while True:
            if partial.exists() and partial.stat().st_size > file.size:
                partial.unlink()
            with partial.open("ab") as stored:
                before = stored.tell()
                try:
                    http_get(
                        url,
                        _Output(stored, self._stop),  # type: ignore[arg-type]
                        resume_size=before,
                        headers=self._headers,
                        expected_size=file.size,
                        displayed_filename=file.name,
                    )
                    return
                except _Stopped:
                    raise
                except Exception as error:
                    if _is_final(error):
                        raise
                    fruitless = 0 if stored.tell() > before else fruitless + 1
                    if fruitless == MAX_FRUITLESS or self._stop.wait(PAUSE_S):
                        raise


def _is_final(error: Exception) -> bool:
    """Return whether another attempt would fail too: access is refused, the disk is full, or the size is wrong."""
    if isinstance(error, HfHubHTTPError):
        return bool(error.response.status_code < 500)
    return type(error) is OSError or getattr(error, "errno", None) is not None


class _Output:
    """A file that ends the download that writes to it once `stop` is set."""

    def __init__(self, file: Any, stop: threading.Event):
        self._file, self._stop = file, stop

    def write(self, data: bytes) -> int:
        if self._stop.is_set():
            raise _Stopped
        written: int = self._file.write(data)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Keep the hub's client from showing bars of its own, unless the environment decides."""
    if "HF_HUB_DISABLE_PROGRESS_BARS" in os.environ or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
