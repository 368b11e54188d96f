"""A server that prepares its model while it is idle: requests come first, and no end of a process does harm."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from jaxserve.calibration.sensitivity.profile import FILE_NAME
from jaxserve.core.bundled import bundled_model_path
from tests.server.process import ServerProcess, server_process
from tests.support.thorough import THOROUGH

PATIENCE = 900  # s
OPTIONS = ("--policy", "morph", "--port", "0", "--memory-gb", "2", "--max-num-seqs", "4", "--max-model-len", "512")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The bundled model, as if nobody had measured it."""
    folder = tmp_path / "model"
    shutil.copytree(bundled_model_path(), folder, ignore=shutil.ignore_patterns(FILE_NAME, "variants"))
    return folder


def wait_for(condition: Callable[[], bool], server: ServerProcess) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, server.errors.read_text()
        time.sleep(0.05)


def prepared_by(server: ServerProcess) -> int | None:
    """Return the id of the process that prepares a server's model, None if there is none."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, stat = (folder / "cmdline").read_bytes(), (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if b"jaxserve.cli.background" in command and stat[0] != "Z" and int(stat[1]) == server.process.pid:
            return int(folder.name)
    return None


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.mark.skipif(not THOROUGH, reason="make test-thorough runs it: a model is prepared at the lowest priority")
def test_server_prepares_its_model_between_requests_and_survives_every_end(model: Path) -> None:
    command = ("-m", "jaxserve.cli.main", "serve", str(model), *OPTIONS)
    kept = model / "variants" / "background"
    with server_process(*command) as server:
        wait_for(lambda: prepared_by(server) is not None, server)
        pid = prepared_by(server)
        assert pid is not None
        body = {"model": "m", "prompt": "def f(", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body | {"model": model.name}, timeout=60
        ) as answer:
            answer.raise_for_status()
            wait_for(lambda: state(pid) == "T", server)
        wait_for(lambda: state(pid) in "SR", server)
        os.kill(pid, signal.SIGKILL)  # as the kernel does when memory runs out
        wait_for(lambda: "nothing is prepared in the background" in server.errors.read_text(), server)
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    with server_process(*command) as server:
        wait_for(lambda: prepared_by(server) is not None, server)
        pid = prepared_by(server)
        server.process.kill()
        wait_for(lambda: state(pid or 0) in ("Z", "X"), server)
    with server_process(*command) as server:
        wait_for(lambda: prepared_by(server) is not None, server)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    with server_process(*command) as server:
        wait_for(lambda: "layers prepared in int4 are used" in server.errors.read_text(), server)
        decisions = httpx.get(f"{server.url}/admin/decisions").json()["decisions"]
        assert decisions[-1]["reason"] == "layers were measured: policy morph -> morph"
        methods = json.loads((kept / FILE_NAME).read_text())["methods"]
        assert methods in ({"int4": "awq", "int8": "rtn"}, {"int4": "rtn", "int8": "rtn"}), "whichever loses less"
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    with server_process(*command) as server:
        assert "layers prepared in int4 are used" in server.errors.read_text()
        assert prepared_by(server) is None


@pytest.mark.skipif(not THOROUGH, reason="make test-thorough runs it: a server of its own")
def test_server_says_why_it_does_not_prepare_its_model(model: Path) -> None:
    with server_process("-m", "jaxserve.cli.main", "serve", str(model), *OPTIONS, "--no-prepare") as server:
        assert "prepared" not in server.errors.read_text()
        assert not (model / "variants").exists()
