"""Spawned servers: waiting until they are ready, failures, and stopping them in every case."""

import os
import signal
import subprocess
import sys
import time

import pytest

from jaxserve.bench.spawn import SpawnError, spawned

PRELUDE = "import os, signal, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\n"
READY = (
    "print('loading', file=sys.stderr)\nprint('jaxserve is ready: m at http://127.0.0.1:1234 (9 tokens)', flush=True)\n"
)


def program(code: str) -> tuple[str, ...]:
    """Return the command of a server that runs `code`. Its first argument is the file for its process id."""
    return (sys.executable, "-c", PRELUDE + code)


def assert_gone(pid_file) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_spawned_address_is_read_from_the_ready_line(tmp_path):
    pid, log = tmp_path / "pid", tmp_path / "log"
    command = program(READY + "print(sys.argv[2:])\nsys.stdout.flush()\ntime.sleep(60)")
    with spawned([str(pid), "model"], timeout_s=30, log_path=log, command=command) as url:
        assert url == "http://127.0.0.1:1234"
        os.kill(int(pid.read_text()), 0)  # runs
    assert_gone(pid)
    assert "['model', '--port', '0']" in log.read_text()


def test_a_server_that_fails_to_start_shows_the_end_of_its_log(tmp_path):
    code = "[print('line', i, flush=True) for i in range(100)]\nsys.exit('no such model: x')"
    with pytest.raises(SpawnError) as caught, spawned([str(tmp_path / "pid")], timeout_s=30, command=program(code)):
        pass
    message = str(caught.value)
    assert message.startswith("the server ended with status 1 before it was ready")
    assert "no such model: x" in message
    assert "line 99" in message
    assert "line 5\n" not in message


def test_sigterm_ends_the_server_and_then_the_measurement(tmp_path):
    pid = tmp_path / "pid"
    command = program(READY + "time.sleep(60)")
    code = (
        "import sys, time\nfrom jaxserve.bench.spawn import spawned\n"
        f"with spawned([{str(pid)!r}], timeout_s=30, command={command!r}):\n"
        "    print('measuring', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as measurement:
        assert measurement.stdout.readline() == "measuring\n"
        measurement.send_signal(signal.SIGTERM)
        assert measurement.wait(30) == 128 + signal.SIGTERM
    assert_gone(pid)


def test_a_server_that_is_never_ready_is_stopped(tmp_path):
    pid = tmp_path / "pid"
    code = "print('compiling', flush=True)\ntime.sleep(60)"
    with pytest.raises(SpawnError, match=r"not ready after 2 s:\ncompiling"):  # noqa: SIM117
        with spawned([str(pid)], timeout_s=2, command=program(code)):
            pass
    assert_gone(pid)


def test_the_server_is_stopped_when_the_measurement_fails(tmp_path):
    pid = tmp_path / "pid"
    command = program(READY + "time.sleep(60)")
    with pytest.raises(ZeroDivisionError), spawned([str(pid)], timeout_s=30, command=command):
        raise ZeroDivisionError
    assert_gone(pid)


def test_a_server_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxserve.bench.spawn.GRACE_S", 0.2)
    pid = tmp_path / "pid"
    command = program("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "time.sleep(60)")
    with spawned([str(pid)], timeout_s=30, command=command):
        start = time.monotonic()
    assert time.monotonic() - start < 30  # it would have slept for 60
    assert_gone(pid)


def test_a_second_ctrl_c_does_not_leave_the_server_behind(tmp_path):
    pid = tmp_path / "pid"
    # Told to end, it presses Ctrl-C for the user, and stays.
    stubborn = "signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGINT))\n"
    command = program(stubborn + READY + "while True: time.sleep(60)")
    with pytest.raises(KeyboardInterrupt), spawned([str(pid)], timeout_s=30, command=command):
        pass
    assert_gone(pid)
