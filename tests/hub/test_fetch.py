"""Models by name: the cache first, then a download of what is needed."""

import errno
import logging
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
from huggingface_hub import constants

from jaxserve.core.errors import CheckpointError, ConfigError, JaxserveError
from jaxserve.hub import HubName, Need, fetch, transfer
from jaxserve.hub.errors import explained
from jaxserve.hub.listing import ask
from tests.hub.conftest import FILES
from tests.support import hub as support
from tests.support.hub import environment

NAME = HubName("org/name")
LARGE = "model-00001-of-00002.safetensors"
NEEDED = {name for name in FILES if name.endswith((".json", "-of-00002.safetensors"))}


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def downloads(hub, name: str) -> list[str | None]:
    """Return the ranges of the requests for a large file's contents."""
    return [seen.range for seen in hub.requests("/cdn/") if seen.method == "GET" and seen.path.endswith(name)]


def refused(match: str, name: HubName = NAME, kind: type[JaxserveError] = CheckpointError, **options) -> str:
    """Return the one line with which a model is refused."""
    with pytest.raises(kind, match=match) as caught:
        fetch(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- what is downloaded


def test_only_needed_files_are_downloaded(hub):
    found = fetch(NAME)
    assert names(found.folder) == NEEDED
    assert all((found.folder / name).read_bytes() == FILES[name] for name in NEEDED)


def test_size_and_licence_are_logged_before_and_bytes_reported_during_a_download(hub, caplog):
    caplog.set_level(logging.INFO)
    reports = []
    assert fetch(NAME, progress=lambda *report: reports.append(report)).license == "apache-2.0"
    assert "506.0 kB in 2 files, licence apache-2.0" in caplog.text
    assert reports[-1] == ("downloading org/name (licence apache-2.0)", 506_000, 506_000)


@pytest.mark.parametrize(
    ("need", "expected"),
    [
        (Need.CONFIG, {"config.json"}),
        (Need.SMALL, {name for name in NEEDED if name.endswith(".json")}),
    ],
)
def test_weights_are_left_out_where_they_are_not_needed(hub, need, expected):
    assert names(fetch(NAME, need).folder) == expected
    count = len(hub.seen)
    fetch(NAME, need)
    assert len(hub.seen) == count
    assert names(fetch(NAME).folder) == NEEDED


def test_single_file_and_files_without_an_index(hub):
    single = {"config.json": b"{}", "model.safetensors": b"s", "other.safetensors": b"o"}
    hub.add("org/single", single)
    assert names(fetch(HubName("org/single")).folder) == {"config.json", "model.safetensors"}
    hub.add("org/other", {"config.json": b"{}", "weights.safetensors": b"w"})
    assert names(fetch(HubName("org/other")).folder) == {"config.json", "weights.safetensors"}


def test_unsupported_model_is_refused_before_its_weights_are_downloaded(hub):
    def check(folder: Path) -> None:
        raise CheckpointError(f"unsupported: {(folder / 'config.json').read_text()}")

    refused("unsupported: .*LlamaForCausalLM", check=check)
    assert not hub.requests(".safetensors/") + hub.requests("/cdn/")


@pytest.mark.parametrize(
    ("files", "match"),
    [
        (("config.json", "pytorch_model.bin"), "has no safetensors, .* is a pickle"),
        (("config.json", "x.gguf"), "has no safetensors, .* is GGUF"),
        (("adapter_config.json", "adapter_model.safetensors"), "has no config.json, .* LoRA adapter"),
    ],
)
def test_repository_without_safetensors_is_refused_before_anything_is_downloaded(hub, files, match):
    hub.add("org/other", dict.fromkeys(files, b"{}"))
    refused(match, HubName("org/other"))
    assert not hub.requests("/resolve/")


# -- the cache


def test_cached_model_costs_no_request(hub):
    folder = fetch(NAME).folder
    hub.seen.clear()
    assert fetch(NAME).folder == folder
    assert fetch(HubName("org/name", folder.name)).folder == folder
    assert fetch(HubName("org/name", folder.name[:8])).folder == folder
    assert not hub.seen


def test_cache_that_the_hubs_client_has_not_listed(hub):
    """Older clients keep no list of a repository's files."""
    folder = fetch(NAME).folder
    shutil.rmtree(folder.parents[1] / "trees", ignore_errors=True)
    hub.seen.clear()
    assert fetch(NAME).folder == folder
    assert not hub.seen
    (folder / LARGE).unlink()
    assert names(fetch(NAME).folder) == NEEDED
    assert hub.seen


@pytest.mark.parametrize("listed", [True, False])
def test_missing_file_is_downloaded_and_named_offline(hub, monkeypatch, listed):
    folder = fetch(NAME).folder
    if not listed:
        shutil.rmtree(folder.parents[1] / "trees", ignore_errors=True)
    (folder / LARGE).unlink()
    (folder / "tokenizer.json").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    told = refused("tokenizer.json and 1 more files are missing in the cache .*HF_HUB_OFFLINE is set")
    assert told.endswith("`jaxserve pull org/name` downloads it where there is a network")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert names(fetch(NAME).folder) == NEEDED


def test_model_without_a_tokenizer_is_used_offline(hub, monkeypatch):
    hub.add("org/ids", {"config.json": b"{}", "model.safetensors": b"w"})
    folder = fetch(HubName("org/ids")).folder
    shutil.rmtree(folder.parents[1] / "trees", ignore_errors=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(HubName("org/ids")).folder == folder


def test_model_that_is_not_in_the_cache_offline(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(r"org/name: no such directory, and not in the cache .*hub; HF_HUB_OFFLINE is set: `jaxserve pull org/name`")
    assert not hub.seen


def test_hub_that_cannot_be_reached(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused(
        r"not in the cache .*; http://127\.0\.0\.1:9 cannot be reached \(Connection refused\): `jaxserve pull org/name`"
    )


def test_cache_behind_a_link_and_in_another_folder(hub, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    folder = fetch(NAME, download_dir=tmp_path / "link").folder
    hub.seen.clear()
    assert fetch(NAME, download_dir=str(tmp_path / "link")).folder == folder
    assert not hub.seen
    assert names(folder) == NEEDED


def test_newer_commit_is_used_when_it_is_asked_for(hub):
    old = fetch(NAME).commit
    new = hub.add("org/name", FILES | {"config.json": b'{"new": 1}'})
    assert fetch(NAME).commit == old
    assert fetch(NAME, latest=True).commit == new
    assert fetch(NAME).commit == new
    assert len(downloads(hub, LARGE)) == 1  # both commits have the same weights


def test_interrupted_update_leaves_the_older_commit_in_use(hub):
    old = fetch(NAME).commit
    hub.add("org/name", FILES | {"model-00002-of-00002.safetensors": b"new"})
    hub.answers["/cdn/"] = 503
    refused("answers 503", latest=True)
    assert fetch(NAME).commit == old


def test_cached_model_does_not_import_the_hubs_client(hub, tmp_path):
    folder = fetch(NAME).folder
    code = (
        "from jaxserve.hub import HubName, fetch; print(fetch(HubName('org/name')).folder)\n"
        "import sys; assert not {'httpx', 'httpx2', 'requests', 'huggingface_hub.hf_api'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(hub.url, tmp_path / "home"), capture_output=True, text=True)
    assert done.stdout == f"{folder}\n", done.stderr


# -- revisions and access


def test_revision(hub):
    other = hub.add("org/name", FILES | {"config.json": b'{"branch": 1}'}, branch="v1")
    found = fetch(HubName("org/name", "v1"))
    assert found.commit == other
    assert (found.folder / "config.json").read_bytes() == b'{"branch": 1}'
    hub.seen.clear()
    assert fetch(HubName("org/name", "v1")) == found.__class__(found.folder, other)
    assert not hub.seen
    assert fetch(NAME).commit != other


def test_missing_revision_and_missing_model(hub):
    refused("org/name has no revision 'v9'", HubName("org/name", "v9"))
    refused("org/nothing: no such directory, and no such model on http.* set HF_TOKEN", HubName("org/nothing"))


def test_gated_model_names_its_page_and_the_variable(hub):
    hub.add("org/gated", FILES, gated=True)
    name = HubName("org/gated")
    refused(f"org/gated is gated: accept its terms at {hub.url}/org/gated, and set HF_TOKEN", name)
    refused("gated", name, token="hf_other")
    assert names(fetch(name, token=hub.valid_token).folder) == NEEDED


def test_token_of_the_environment(hub, monkeypatch):
    hub.add("org/gated", FILES, gated=True)
    monkeypatch.setenv("HF_TOKEN", hub.valid_token)
    assert names(fetch(HubName("org/gated")).folder) == NEEDED


def test_hash_that_is_none_does_not_become_a_path(hub, monkeypatch):
    assert ask(NAME, None).files[LARGE].sha256 == support.etag(LARGE, FILES[LARGE])
    monkeypatch.setattr(support, "etag", lambda name, data: "../../../../outside")
    assert ask(NAME, None).files[LARGE].sha256 is None


def test_hub_without_commits(hub):
    hub.repositories["org/name"].branches["main"] = "../x"
    hub.commits["../x"] = FILES
    refused(r"answers for org/name with '\.\./x', which is no commit")


# -- transfers that fail


def test_broken_connections_go_on_where_they_broke(hub):
    hub.cut_after[LARGE] = [200_000]
    assert (fetch(NAME).folder / LARGE).read_bytes() == FILES[LARGE]
    first, second = downloads(hub, LARGE)
    assert first is None
    assert second is not None
    assert int(second.removeprefix("bytes=").rstrip("-")) > 100_000


def test_hub_that_fails_for_a_moment_is_asked_again(hub):
    hub.once["/cdn/"] = 503
    assert names(fetch(NAME).folder) == NEEDED


def test_interrupted_download_goes_on_at_the_next_start(hub):
    def progress(doing: str, done: int, total: int) -> None:
        if done > 100_000:
            raise KeyboardInterrupt

    hub.pause = 0.1
    with pytest.raises(KeyboardInterrupt):
        fetch(NAME, progress=progress)
    assert (fetch(NAME).folder / LARGE).read_bytes() == FILES[LARGE]
    assert all(sent is not None for sent in downloads(hub, LARGE)[1:])


def test_killed_download_goes_on_at_the_next_start(hub, tmp_path):
    hub.pause = 0.1
    process = fetching(hub, tmp_path)
    blobs = tmp_path / "home/hub/models--org--name/blobs"
    wait_until(lambda: any(path.stat().st_size > 60_000 for path in blobs.glob("*.incomplete")))
    process.kill()
    process.wait()
    hub.pause = 0.0
    assert (fetch(NAME).folder / LARGE).read_bytes() == FILES[LARGE]
    assert downloads(hub, LARGE)[-1] is not None


def test_two_processes_download_each_file_once(hub, tmp_path):
    hub.pause = 0.1
    process = fetching(hub, tmp_path)
    wait_until(lambda: bool(downloads(hub, LARGE)))
    folder = fetch(NAME).folder
    assert process.wait(60) == 0
    assert names(folder) == NEEDED
    assert downloads(hub, LARGE) == [None]


def fetching(hub, tmp_path: Path) -> subprocess.Popen:
    code = (
        "from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 1 << 16\n"
        "from jaxserve.hub import HubName, fetch; fetch(HubName('org/name'))\n"
        "import sys; assert not {'pydantic', 'fastapi', 'starlette', 'jax'} & sys.modules.keys()"
    )
    return subprocess.Popen([sys.executable, "-c", code], env=environment(hub.url, tmp_path / "home"))


def wait_until(reached, limit: float = 60) -> None:
    end = time.monotonic() + limit
    while not reached():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_hub_that_fails_halfway_is_told_with_what_helps(hub):
    hub.answers["/cdn/"] = 503
    refused("answers 503 for org/name: what has come of org/name is kept, `jaxserve pull org/name` gets the rest")


def test_damaged_file_is_deleted(hub, monkeypatch):
    commit = fetch(NAME).commit
    newer = hub.add("org/name", FILES | {LARGE: b"what the hash is of"})
    assert newer != commit
    monkeypatch.setattr(hub, "commits", hub.commits | {newer: hub.commits[newer]})
    monkeypatch.setattr("tests.support.hub.Handler.send_contents", sending_other_bytes())
    refused(f"{LARGE} of org/name is damaged", latest=True)
    assert not list((fetch(NAME).folder.parents[1] / "blobs").glob("*.incomplete"))


def sending_other_bytes():
    from tests.support.hub import Handler

    original = Handler.send_contents

    def send(self, name: str, data: bytes) -> None:
        original(self, name, data[::-1] if name == LARGE else data)

    return send


def test_full_disk_is_told_before_the_download(hub, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    told = refused("org/name takes 506.0 kB more, and .* has 1.0 kB free", kind=ConfigError)
    assert "--download-dir" in told
    assert not hub.requests("/cdn/")


def test_disk_that_fills_up_during_the_download(hub, monkeypatch):
    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(transfer._Output, "write", write)
    refused("the disk is full: .* --download-dir or HF_HOME", kind=ConfigError)


def test_error_of_the_program_is_not_blamed_on_the_network(hub, monkeypatch):
    monkeypatch.setattr(transfer, "download_small", lambda: None)
    with pytest.raises(TypeError):
        fetch(NAME)


def test_answer_that_is_no_hubs(hub, monkeypatch):
    monkeypatch.setattr("tests.support.hub.Handler.describe", lambda self, rest: self.send_contents("page", b"<html>"))
    refused("cannot be reached")


def test_cache_that_cannot_be_written_to(tmp_path):
    error = explained(OSError(errno.EROFS, "Read-only file system"), NAME, tmp_path)
    assert str(error) == (
        f"cannot write into {tmp_path}: Read-only file system: choose another folder with --download-dir or HF_HOME"
    )
