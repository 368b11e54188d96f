"""A progress bar that may be interrupted and dropped at any moment."""

import threading
from typing import Any

from tqdm.auto import tqdm


class ProgressBar(tqdm):
    """A tqdm bar whose lock is released after any exception, and which has no monitoring thread.

    tqdm itself keeps its lock when an interrupt ends a refresh. Another thread that then frees the bar waits forever.
    """

    monitor_interval = 0
    _lock = threading.RLock()

    def __init__(self, total: int, unit: str, desc: str):
        self.disable = True  # a bar from an interrupted constructor has nothing to close
        super().__init__(total=total, unit=unit, desc=desc, miniters=1)

    def refresh(self, nolock: bool = False, lock_args: Any = None) -> None:
        """Redraw the bar."""
        with self._lock:
            super().refresh(nolock=True)
