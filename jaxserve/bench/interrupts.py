"""Termination signals handled as Ctrl-C."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # sent by `timeout`, by job schedulers, by a closing terminal


@contextlib.contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP as SIGINT inside: keep what was measured and stop what was started.

    Signals that are ignored (as SIGHUP under nohup) or already handled stay as they are. Main thread only.
    """
    taken = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # SIGINT is ignored in background jobs of a script.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        raise KeyboardInterrupt
    # The current handler decides what happens: asyncio's loop cancels its main task.
    signal.raise_signal(signal.SIGINT)
