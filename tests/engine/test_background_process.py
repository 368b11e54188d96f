"""The process beside an engine: it works only while the engine is idle, and never outlives it."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxserve.core.bundled import bundled_model_path
from jaxserve.engine.background_process import BackgroundProcess

PATIENCE = 60.0  # s
LOTS = 1 << 40
LIVES = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"


class Engine:
    """An engine that is busy when it is told to be, and a process beside it."""

    def __init__(self, code: str, folder: Path, *, max_bytes: int = LOTS, busy: bool = False):
        self.busy, self.done, self.note = busy, threading.Event(), folder / "pid"
        self.process = BackgroundProcess(
            [sys.executable, "-c", code, str(self.note)],
            busy=lambda: self.busy,
            max_bytes=max_bytes,
            done=self.done.set,
            quiet=0.05,
        )

    @property
    def pid(self) -> int:
        wait_for(lambda: self.note.exists() and self.note.read_text() != "")
        return int(self.note.read_text())


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def state(pid: int) -> str:
    """Return the state of a process: "T" if it is stopped, "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_gone(pid: int) -> bool:
    return state(pid) in ("", "Z")


def test_process_is_stopped_while_the_engine_is_busy(tmp_path: Path) -> None:
    engine = Engine(LIVES, tmp_path)
    for _ in range(2):
        wait_for(lambda: state(engine.pid) == "S")
        engine.busy = True
        wait_for(lambda: state(engine.pid) == "T")
        engine.busy = False
    wait_for(lambda: state(engine.pid) == "S")
    engine.process.close()
    assert is_gone(engine.pid)
    assert not engine.done.is_set()


def test_process_does_not_begin_before_the_engine_is_idle(tmp_path: Path) -> None:
    engine = Engine(LIVES, tmp_path, busy=True)
    time.sleep(0.5)
    assert not engine.note.exists()
    engine.process.close()
    engine.process.close()
    assert not engine.note.exists()


def test_stopped_process_ends_at_once_when_the_engine_closes(tmp_path: Path) -> None:
    engine = Engine(LIVES, tmp_path)
    wait_for(lambda: engine.pid > 0)
    engine.busy = True
    wait_for(lambda: state(engine.pid) == "T")
    engine.process.close()
    assert is_gone(engine.pid)


def test_end_of_the_process_is_told_to_the_engine(tmp_path: Path) -> None:
    engine = Engine("pass", tmp_path)
    assert engine.done.wait(PATIENCE)
    engine.process.close()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit('the disk is full')", "nothing is prepared in the background: the disk is full"),
        ("raise SystemExit(3)", "nothing is prepared in the background: its process ended with status 3"),
        ("1 / 0", "ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", "its process ended with status -9"),
        ("import sys; sys.stderr.write('x' * 10_000_000); sys.exit(1)", "xxx"),
    ],
)
def test_failure_of_the_process_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: str, message: str
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = Engine(code, tmp_path)
        wait_for(lambda: bool(caplog.records))
        engine.process.close()
    (record,) = caplog.records
    assert message in record.getMessage()
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 500
    assert not engine.done.is_set()


def test_program_that_is_not_there_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    process = BackgroundProcess(["/nowhere"], busy=lambda: False, max_bytes=LOTS, done=lambda: None, quiet=0.0)
    wait_for(lambda: bool(caplog.records))
    process.close()
    assert len(caplog.records) == 1


def test_process_that_takes_too_much_memory_is_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = LIVES.replace("time.sleep", "x = bytearray(200_000_000); x[::4096] = b'1' * len(x[::4096]); time.sleep")
    engine = Engine(code, tmp_path, max_bytes=100_000_000)
    wait_for(lambda: is_gone(engine.pid))
    engine.process.close()
    assert "it would take more than 95 MB" in caplog.text


def test_failure_of_what_is_told_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("cannot be read")

    process = BackgroundProcess([sys.executable, "-c", ""], busy=lambda: False, max_bytes=LOTS, done=fail, quiet=0.0)
    wait_for(lambda: bool(caplog.records))
    process.close()
    assert "cannot be read" in caplog.text


# -- the process itself

YIELDS = """
import os, sys, time
from jaxserve.cli.background import yield_to_others
yield_to_others(int(sys.argv[2]))
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(600)
"""
SERVER = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {YIELDS!r}, sys.argv[1], str(os.getpid())])
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such request to the kernel")
def test_process_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", SERVER, str(note)]) as server:
        wait_for(lambda: note.exists() and note.read_text() != "")
        pid = int(note.read_text())
        assert os.sched_getscheduler(pid) == os.SCHED_IDLE
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19
        assert len(os.sched_getaffinity(pid)) == 1
        os.kill(pid, signal.SIGSTOP)
        server.kill()
    wait_for(lambda: is_gone(pid))


def test_process_of_a_server_that_has_ended_does_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", YIELDS, str(tmp_path / "pid"), "1"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 1
    assert done.stderr == "the server has ended\n"


# -- its work


def test_two_servers_of_a_model_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxserve.calibration import background as work
    from jaxserve.cli import background

    made, begun, may_end = [], threading.Event(), threading.Event()

    def prepare(*arguments: object) -> None:
        begun.set()
        assert may_end.wait(PATIENCE)
        made.append(arguments)

    monkeypatch.setattr(work, "prepare", prepare)
    monkeypatch.setattr(work, "missing", lambda wanted, checkpoint: not made)
    wanted = {"model": str(bundled_model_path()), "folder": str(tmp_path), "variants": ["int4"], "rounded": []}
    servers = [threading.Thread(target=background.run, args=(wanted,)) for _ in range(2)]
    for server in servers:
        server.start()
    assert begun.wait(PATIENCE)
    time.sleep(0.2)
    assert not made
    may_end.set()
    for server in servers:
        server.join(PATIENCE)
    assert len(made) == 1
