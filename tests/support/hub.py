"""A hub on the loopback interface, with the parts of its HTTP interface that downloads of models use, and faults."""

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

CHUNK = 1 << 16


@dataclass
class Repository:
    files: dict[str, bytes]
    license: str | None = "apache-2.0"
    gated: bool = False
    branches: dict[str, str] = field(default_factory=dict)  # commits by name


@dataclass(frozen=True)
class Seen:
    """A request that the hub has received."""

    method: str
    path: str
    range: str | None
    token: str | None


class LoopbackHub:
    """The repositories, the requests so far, and what goes wrong.

    `cut_after`: for files by name, after how many bytes the connections of the next requests break. `answers`: status
    codes for paths that begin so; `once`: the same for one request. `pause`: seconds before each chunk of a file.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.commits: dict[str, dict[str, bytes]] = {}
        self.seen: list[Seen] = []
        self.cut_after: dict[str, list[int]] = {}
        self.answers: dict[str, int] = {}
        self.once: dict[str, int] = {}
        self.pause = 0.0
        self.valid_token = "hf_valid"

    def add(self, id: str, files: dict[str, bytes], *, branch: str = "main", **more: object) -> str:
        """Add files as the newest commit of a branch, and return the commit."""
        digest = hashlib.sha1(id.encode())
        for name, data in sorted(files.items()):
            digest.update(name.encode() + data)
        commit = digest.hexdigest()
        repository = self.repositories.setdefault(id, Repository(files, **more))
        repository.branches[branch] = commit
        self.commits[commit] = dict(files)
        return commit

    def requests(self, part: str = "") -> list[Seen]:
        """Return the requests whose path contains a text."""
        return [seen for seen in self.seen if part in seen.path]


def is_large(name: str) -> bool:
    return name.endswith(".safetensors")


def etag(name: str, data: bytes) -> str:
    return (
        hashlib.sha256(data).hexdigest()
        if is_large(name)
        else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LoopbackHub

    def do_GET(self) -> None:
        path, token = unquote(urlsplit(self.path).path), self.headers.get("authorization", "").removeprefix("Bearer ")
        self.hub.seen.append(Seen(self.command, path, self.headers.get("range"), token or None))
        for start, status in (self.hub.answers | self.hub.once).items():
            if path.startswith(start):
                self.hub.once.pop(start, None)
                return self.fail(status)
        if path.startswith("/api/models/"):
            return self.describe(path.removeprefix("/api/models/"))
        if path.startswith("/cdn/"):
            _, _, commit, name = path.split("/", 3)
            return self.send_contents(name, self.hub.commits[commit][name])
        return self.resolve(*path[1:].partition("/resolve/")[::2])

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None: ...

    def describe(self, rest: str) -> None:
        id, kind, revision = rest, "", "main"
        for word in ("revision", "tree"):
            if f"/{word}/" in rest:
                id, _, revision = rest.partition(f"/{word}/")
                kind = word
        repository = self.hub.repositories.get(id)
        if repository is None:
            return self.fail(401)
        commit = self.commit(repository, revision)
        if commit is None:
            return self.fail(404, "RevisionNotFound")
        files = self.hub.commits[commit]
        if kind == "tree":
            return self.send_json([self.entry(name, data) for name, data in sorted(files.items())])
        siblings = [{"rfilename": name, **self.blob(name, data)} for name, data in sorted(files.items())]
        card = {} if repository.license is None else {"license": repository.license}
        gated = "auto" if repository.gated else False
        return self.send_json({"id": id, "sha": commit, "siblings": siblings, "cardData": card, "gated": gated})

    def entry(self, name: str, data: bytes) -> dict[str, object]:
        found = {"type": "file", "path": name, "size": len(data), "oid": etag("", data)}
        lfs = {"oid": etag(name, data), "size": len(data), "pointerSize": 134}
        return found | ({"lfs": lfs} if is_large(name) else {})

    def blob(self, name: str, data: bytes) -> dict[str, object]:
        lfs = {"sha256": etag(name, data), "size": len(data), "pointerSize": 134}
        return {"size": len(data), "blobId": etag("", data)} | ({"lfs": lfs} if is_large(name) else {})

    def commit(self, repository: Repository, revision: str) -> str | None:
        known = repository.branches
        return known.get(revision) or next((commit for commit in known.values() if commit == revision), None)

    def resolve(self, id: str, rest: str) -> None:
        repository, (revision, _, name) = self.hub.repositories.get(id), rest.partition("/")
        if repository is None:
            return self.fail(401)
        if repository.gated and self.hub.seen[-1].token != self.hub.valid_token:
            return self.fail(403 if self.hub.seen[-1].token else 401, "GatedRepo")
        commit = self.commit(repository, revision)
        data = None if commit is None else self.hub.commits[commit].get(name)
        if commit is None or data is None:
            return self.fail(404, "EntryNotFound" if commit else "RevisionNotFound")
        self.repo_commit = commit
        if not is_large(name):
            return self.send_contents(name, data)
        self.send_response(302)
        for header, value in {
            "location": f"/cdn/{commit}/{name}",
            "x-repo-commit": commit,
            "x-linked-etag": f'"{etag(name, data)}"',
            "x-linked-size": str(len(data)),
            "content-length": "0",
        }.items():
            self.send_header(header, value)
        self.end_headers()
        return None

    def send_contents(self, name: str, data: bytes) -> None:
        first = int(self.headers["range"].removeprefix("bytes=").partition("-")[0]) if "range" in self.headers else 0
        self.send_response(206 if first else 200)
        self.send_header("etag", f'"{etag(name, data)}"')
        self.send_header("content-length", str(len(data) - first))
        self.send_header("accept-ranges", "bytes")
        if first:
            self.send_header("content-range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        if hasattr(self, "repo_commit"):
            self.send_header("x-repo-commit", self.repo_commit)
        self.end_headers()
        if self.command == "HEAD":
            return
        cuts = self.hub.cut_after.get(name)
        last = min(len(data), first + cuts.pop(0)) if cuts else len(data)
        for start in range(first, last, CHUNK):
            time.sleep(self.hub.pause)
            with contextlib.suppress(ConnectionError):
                self.wfile.write(data[start : min(start + CHUNK, last)])
        if last < len(data):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def fail(self, status: int, code: str | None = None) -> None:
        self.send_response(status)
        if code:
            self.send_header("x-error-code", code)
        self.send_header("content-length", "0")
        self.end_headers()


@contextlib.contextmanager
def serving(hub: LoopbackHub) -> Iterator[str]:
    """Serve a hub, and yield its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def reachable(hub: LoopbackHub, home: Path) -> Iterator[str]:
    """Serve a hub to the hub's client in this process, with a cache of its own, and yield the hub's URL.

    The client has read the environment when it was imported.
    """
    with serving(hub) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_HOME", str(home))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            patch.delenv(name, raising=False)
        yield url


def environment(url: str, home: Path, **more: str) -> dict[str, str]:
    """Return the environment of a process that knows only one hub, and has a cache of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return kept | {"HF_ENDPOINT": url, "HF_HOME": str(home)} | more
