"""A progress bar that may be interrupted, and forgotten, at any moment."""

import threading
from typing import Any

from tqdm.auto import tqdm


class ProgressBar(tqdm):
    """tqdm's bar with a lock that no exception leaves locked and no thread that watches it.

    tqdm itself keeps its lock when an interrupt ends a refresh. Another thread that then frees the bar waits for ever.
    """

    monitor_interval = 0
    _lock = threading.RLock()

    def __init__(self, total: int, unit: str, desc: str):
        self.disable = True  # what an interrupted constructor leaves has nothing to close
        super().__init__(total=total, unit=unit, desc=desc, miniters=1)

    def refresh(self, nolock: bool = False, lock_args: Any = None) -> None:
        """Shows the bar as it is now."""
        with self._lock:
            super().refresh(nolock=True)
