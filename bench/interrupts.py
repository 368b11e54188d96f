"""Ends from outside, for measurements that run for minutes."""

import contextlib
import signal
from collections.abc import Iterator

from jaxserve.bench.interrupts import ended_as_by_ctrl_c


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt, so that what was measured is kept.

    SIGINT does so even where it is ignored: a shell without job control starts what it puts into the background like
    that, and whoever sends the signal to this process means it. Only for the main thread.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ended_as_by_ctrl_c():
            yield
    finally:
        signal.signal(signal.SIGINT, before)
