"""The beginning of the process: Ctrl-C is answered in one line also while the command line's modules are imported."""

import os
import signal
from types import FrameType


def main() -> None:
    """Run the `jaxserve` command."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # a shell's background jobs ignore Ctrl-C
        signal.signal(signal.SIGINT, _end)
    from jaxserve.cli.main import main as run

    signal.signal(signal.SIGINT, handler)
    run()


def _end(number: int, _: FrameType | None) -> None:
    """End the process at once: an exception would be raised in the middle of an import, which may hide it."""
    os.write(2, b"jaxserve: interrupted\n")
    os._exit(128 + number)
