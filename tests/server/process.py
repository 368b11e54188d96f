"""A server in a separate process, for tests of signals, exit codes and a whole engine."""

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE = 180  # seconds of waiting after which a test fails


@dataclass(frozen=True)
class ServerProcess:
    """A process that serves at `url`. Its output goes to files, so that it never waits for a reader."""

    process: subprocess.Popen
    url: str
    output: Path
    errors: Path

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for the process to end and return its exit status."""
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(_stacks(self.process, self.errors)) from None


@contextlib.contextmanager
def started(*arguments: str, **options: Any) -> Iterator[subprocess.Popen]:
    """Run `python arguments...` and kill it at the end. Its output goes to pipes unless `options` say otherwise."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-X", "faulthandler", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, **(pipes | options))
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def server_process(*arguments: str, **options: Any) -> Iterator[ServerProcess]:
    """Run `python arguments...` until the block ends, and yield it once it has printed the address of its server."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        with (
            output.open("w") as out,
            errors.open("w") as err,
            started(*arguments, stdout=out, stderr=err, **options) as process,
        ):
            deadline = time.monotonic() + PATIENCE
            while not (found := re.search(r"https?://[\d.]+:\d+|unix:\S+", output.read_text())):
                assert process.poll() is None, f"the server ended before it was ready:\n{errors.read_text()}"
                assert time.monotonic() < deadline, _stacks(process, errors)
                time.sleep(0.02)
            yield ServerProcess(process, found[0], output, errors)


def _stacks(process: subprocess.Popen, errors: Path) -> str:
    """Abort a stuck process and return its errors, which end with the stack of each thread."""
    process.send_signal(signal.SIGABRT)
    process.wait()
    return f"no end after {PATIENCE} s:\n{errors.read_text()}"
