"""A server in a process of its own, for the time of a measurement."""

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
READY = re.compile(r"is ready: .* at (https?://\S+)\s")
POLL_S = 0.05
GRACE_S = 20.0  # to end after SIGTERM; then SIGKILL
TAIL_LINES = 20


class SpawnError(JaxserveError):
    """The server ended, or was not ready in time; the message holds the end of its log."""


@contextlib.contextmanager
def spawned(
    args: Sequence[str], *, timeout_s: float, log_path: Path | None = None, command: Sequence[str] = SERVE
) -> Iterator[str]:
    """The base URL of a `jaxserve serve args...` on a free port, which ends with the context.

    Its output goes to `log_path`, or to a file that is removed. Raises SpawnError if it is not ready in `timeout_s`.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_sigterm_is_an_exit())
        if log_path is None:
            log_path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxserve-"))) / "server.log"
        log = stack.enter_context(log_path.open("wb"))
        # A session of its own: Ctrl-C is for the client, which then ends the server after its last look at it.
        process = subprocess.Popen(
            [*command, *args, "--port", "0"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        stack.callback(_stop, process)
        yield _when_ready(process, log_path, timeout_s)


@contextlib.contextmanager
def _sigterm_is_an_exit() -> Iterator[None]:
    """Has SIGTERM end the program by an exception, so that the server ends too; but for a program that handles it."""

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
    """Waits for the line in which the server says where it is. Raises SpawnError."""
    deadline = time.monotonic() + timeout_s
    while True:
        status = process.poll()  # before the log is read: what is there then is all there will be
        if ready := READY.search(_text(log_path)):
            return ready[1]
        if status is not None:
            raise SpawnError(f"the server ended with status {status} before it was ready:\n{_tail(log_path)}")
        if time.monotonic() > deadline:
            raise SpawnError(f"the server was not ready after {timeout_s:g} s:\n{_tail(log_path)}")
        time.sleep(POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL if that does not help, or if a second Ctrl-C ends the wait."""
    try:
        process.terminate()  # in here already: the second Ctrl-C may come before the wait has begun
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:
        process.kill()
        process.wait()


def _text(log_path: Path) -> str:
    return log_path.read_text(errors="replace")


def _tail(log_path: Path) -> str:
    return "\n".join(_text(log_path).splitlines()[-TAIL_LINES:]) or "(it printed nothing)"
