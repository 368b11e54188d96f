"""A server in its own process, for the duration of a measurement."""

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxserve.core.errors import JaxserveError

SERVE = (sys.executable, "-m", "jaxserve.cli.main", "serve")
READY = re.compile(r"is ready: .* at ((?:https?://|unix:)\S+)\s")
POLL_S = 0.05
GRACE_S = 20.0  # between SIGTERM and SIGKILL
TAIL_LINES = 20


class SpawnError(JaxserveError):
    """The server ended, or was not ready in time. The message holds the end of its log."""


@contextlib.contextmanager
def spawned(
    args: Sequence[str], *, timeout_s: float, log_path: Path | None = None, command: Sequence[str] = SERVE
) -> Iterator[str]:
    """Start `jaxserve serve args...` on a free port, yield its base URL, and stop it at the end.

    Its output goes to `log_path`, by default to a temporary file. Raise SpawnError if the server is not ready within
    `timeout_s`.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_sigterm_raises_system_exit())
        if log_path is None:
            log_path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxserve-"))) / "server.log"
        log = stack.enter_context(log_path.open("wb"))
        # In its own session, so that Ctrl-C reaches only the client, which samples the server once more and stops it.
        process = subprocess.Popen(
            [*command, *args, "--port", "0"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        stack.callback(_stop, process)
        yield _when_ready(process, log_path, timeout_s)


@contextlib.contextmanager
def _sigterm_raises_system_exit() -> Iterator[None]:
    # By an exception, so that the server is stopped too. A program that handles SIGTERM itself keeps its handler.

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _when_ready(process: subprocess.Popen[bytes], log_path: Path, timeout_s: float) -> str:
    """Wait for the log line that contains the server's address, and return the address. Raise SpawnError."""
    deadline = time.monotonic() + timeout_s
    while True:
        # Before the log is read: a process that has ended writes nothing more.
        status = process.poll()
        if ready := READY.search(_text(log_path)):
            return ready[1]
        if status is not None:
            raise SpawnError(f"the server ended with status {status} before it was ready:\n{_tail(log_path)}")
        if time.monotonic() > deadline:
            raise SpawnError(f"the server was not ready after {timeout_s:g} s:\n{_tail(log_path)}")
        time.sleep(POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    try:
        # Inside the try: a second Ctrl-C may arrive before the wait begins, and then the process is killed.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:
        process.kill()
        process.wait()


def _text(log_path: Path) -> str:
    return log_path.read_text(errors="replace")


def _tail(log_path: Path) -> str:
    return "\n".join(_text(log_path).splitlines()[-TAIL_LINES:]) or "(its log is empty)"
