"""A process of its own that works only while an engine has nothing to do, and never holds it up."""

import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from jaxserve.core.machine import resident_bytes

log = logging.getLogger(__name__)

INTERVAL = 0.1  # s between two looks at the engine
QUIET = 1.0  # s without requests after which the process goes on
LAST_WORDS = 300  # characters of the process's errors in the log


class BackgroundProcess:
    """A process that is stopped (SIGSTOP) while an engine is busy, and goes on when it has been idle for a second.

    A thread watches it. Its end, and that of this process, ends the other one.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        busy: Callable[[], bool],
        max_bytes: int,
        done: Callable[[], None],
        environment: Mapping[str, str] | None = None,
        quiet: float = QUIET,
    ):
        """Start the process when the engine is idle for the first time.

        `busy` says whether the engine has work. A process that takes more memory than `max_bytes` is ended. `done` is
        called in the thread if the process ends with status 0; otherwise the last line that it wrote is logged.
        """
        self._command, self._environment = list(command), environment
        self._busy, self._max_bytes, self._done, self._quiet = busy, max_bytes, done, quiet
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxserve-background", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the process at once, and wait for the thread. May be called several times."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # serving goes on
            log.warning("nothing is prepared in the background: %s", error)

    def _watch(self) -> None:
        if not self._wait_until_idle():
            return
        # The process ends with the thread that started it, which is this one.
        with subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,  # Ctrl-C is for the server, which ends this process
        ) as process:
            words = _Words(process)
            try:
                ended = self._wait(process)
            finally:
                _signal(process, signal.SIGKILL)
                words.join(1.0)
        if ended and process.returncode == 0:
            self._done()
        elif ended:
            reason = words.last() or f"its process ended with status {process.returncode}"
            log.warning("nothing is prepared in the background: %s", reason)

    def _wait_until_idle(self) -> bool:
        """Return whether the engine has been idle for a while; False if this is closed before."""
        since = time.monotonic()
        while not self._closing.wait(INTERVAL):
            if self._busy():
                since = time.monotonic()
            elif time.monotonic() - since >= self._quiet:
                return True
        return False

    def _wait(self, process: subprocess.Popen[bytes]) -> bool:
        """Let the process work while the engine is idle. Return whether it has ended, and was not ended."""
        running = True
        while process.poll() is None:
            if self._closing.is_set():
                return False
            if resident_bytes(process.pid) > self._max_bytes:
                mb = self._max_bytes >> 20
                log.warning("nothing is prepared in the background: it would take more than %d MB", mb)
                return False
            if running and self._busy():
                _signal(process, signal.SIGSTOP)
                running = False
            elif not running:
                running = self._wait_until_idle()
                _signal(process, signal.SIGCONT)
            self._closing.wait(INTERVAL)
        return not self._closing.is_set()


class _Words(threading.Thread):
    """The last line that a process writes to its standard error, which is read so that the process never waits."""

    def __init__(self, process: subprocess.Popen[bytes]):
        super().__init__(name="jaxserve-background-words", daemon=True)
        assert process.stderr is not None
        self._stream, self._line = process.stderr, b""
        self.start()

    def run(self) -> None:
        for line in self._stream:
            self._line = line.strip() or self._line

    def last(self) -> str:
        self.join(1.0)
        return self._line.decode(errors="replace")[-LAST_WORDS:]


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(number)
