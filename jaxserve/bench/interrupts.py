"""Ends from outside that are treated as Ctrl-C is."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # of `timeout`, of a job that is cancelled, of a terminal that is closed


@contextlib.contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP do what SIGINT does: what was measured is kept, what was started is stopped.

    A signal that is ignored or already handled stays so, as SIGHUP under nohup. Only for the main thread.
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
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background of a script
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)  # to whoever handles it now: asyncio's loop cancels its main task
