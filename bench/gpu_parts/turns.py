"""Turns on the device: parts prepare side by side, and measure one after the other.

Loading and compiling take longer than most measurements, and need the processor alone. With `python -m bench.gpu
--overlap` all parts begin together; each calls `wait_for_turn` when it is ready to measure. Turns begin when all are
ready, or at half of the time, because what compiles takes cores, and XLA tries its choices on the device.
"""

import os
import time
from pathlib import Path

FOLDER = "JAXSERVE_BENCH_TURNS"  # environment variable: where parts say that they are ready, and are told to go on
LOOK_S = 0.05


def wait_for_turn() -> None:
    """Say that this part is ready, and wait until it may use the device alone; return at once without turns."""
    if folder := os.environ.get(FOLDER):
        ready(Path(folder), os.getpid()).touch()
        while not turn(Path(folder), os.getpid()).exists():
            time.sleep(LOOK_S)


def ready(folder: Path, process: int) -> Path:
    """Return the file that a process makes when it has prepared everything."""
    return folder / f"ready-{process}"


def turn(folder: Path, process: int) -> Path:
    """Return the file that gives a process its turn."""
    return folder / f"turn-{process}"
