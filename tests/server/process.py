"""A server in a process of its own, for what only a process has: signals, exit codes, a whole engine."""

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE = 180  # seconds; a test that waits so long has failed


@dataclass(frozen=True)
class ServerProcess:
    """A process that serves at `url`."""

    process: subprocess.Popen
    url: str

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit status."""
        return self.process.wait(PATIENCE)


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen]:
    """`python arguments...` with its output in pipes; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def server_process(*arguments: str) -> Iterator[ServerProcess]:
    """As `started`, once it has printed the address at which it is ready."""
    with started(*arguments) as process:
        for line in process.stdout:
            if found := re.search(r"http://[\d.]+:\d+", line):
                yield ServerProcess(process, found[0])
                return
        raise AssertionError(f"the server ended before it was ready:\n{process.stderr.read()}")
