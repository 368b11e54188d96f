"""`jaxserve` that stands still in the middle of a transition: held.py METHOD FOLDER serve ...

Where METHOD, as module:Class.method, is called for the first time, the process writes FOLDER/reached and takes no step
until there is FOLDER/go. Steps before that take long, so that requests are still under way then. Copies take for ever
while there are steps.
"""

import importlib
import sys
import time
from pathlib import Path
from typing import Any

from jaxserve.cli.main import main
from jaxserve.executor.executor import BlockExecutor
from jaxserve.planning.memory import COPY_RATES

STEP = 0.05  # seconds


def hold(method: str, folder: Path) -> None:
    reached, go = folder / "reached", folder / "go"
    module, _, path = method.partition(":")
    owner, name = path.split(".")
    kind = getattr(importlib.import_module(module), owner)
    called, execute = getattr(kind, name), BlockExecutor.execute

    def stand() -> None:
        while not go.exists():
            time.sleep(0.01)

    def held(*args: Any, **options: Any) -> Any:
        if not reached.exists():
            reached.touch()
            stand()
        return called(*args, **options)

    def execute_slowly(*args: Any) -> Any:
        if not go.exists():
            time.sleep(STEP)
        if reached.exists():
            stand()
        return execute(*args)

    setattr(kind, name, held)
    BlockExecutor.execute = execute_slowly  # type: ignore[method-assign]
    COPY_RATES["cpu"] = 1.0


if __name__ == "__main__":
    method, folder, *sys.argv[1:] = sys.argv[1:]
    hold(method, Path(folder))
    main()
