"""The throttle for copies that are made while steps run."""

import time
from collections.abc import Callable


class Throttle:
    """A throttle that makes one thread's copies wait, so that steps keep the memory's bandwidth and the cores.

    While `busy()` is true, the thread copies at most `rate` bytes/s and computes for at most a share `share` of the
    time. The share is the narrower bound for small arrays and for work without copies. Otherwise nothing waits.
    """

    def __init__(self, rate: float, share: float, busy: Callable[[], bool], wait: Callable[[float], object]):
        self._rate, self._share, self._busy, self._wait = rate, share, busy, wait
        self._begin()

    def copied(self, size: int) -> None:
        """Wait as long as is needed after `size` bytes were copied since the last call of `copied` or `worked`."""
        self._pause(size / self._rate)

    def worked(self) -> None:
        """Wait as long as is needed after work without a copy since the last call of `copied` or `worked`."""
        self._pause(0.0)

    def _pause(self, copy_seconds: float) -> None:
        work_seconds = (time.thread_time() - self._thread_time) / self._share
        remaining = max(copy_seconds, work_seconds) - (time.monotonic() - self._since)
        if remaining > 0 and self._busy():
            self._wait(remaining)
        self._begin()

    def _begin(self) -> None:
        self._since, self._thread_time = time.monotonic(), time.thread_time()
