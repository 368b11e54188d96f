"""A `jaxserve` command that stops in the middle of a transition: stalled_server.py METHOD FOLDER serve ...

At the first call of METHOD (module:Class.method) the process writes FOLDER/reached and takes no step until FOLDER/go
exists. Steps before that are slow, so that requests are still in flight. Copies never end while steps run.
"""

import importlib
import sys
import time
from pathlib import Path
from typing import Any

from jaxserve.cli.main import main
from jaxserve.executor.executor import BlockExecutor
from jaxserve.planning.memory import COPY_RATES

STEP = 0.05  # seconds of a slow step


def stall(method: str, folder: Path) -> None:
    reached, go = folder / "reached", folder / "go"
    module, _, path = method.partition(":")
    owner, name = path.split(".")
    kind = getattr(importlib.import_module(module), owner)
    called, execute = getattr(kind, name), BlockExecutor.execute

    def wait_for_go() -> None:
        while not go.exists():
            time.sleep(0.01)

    def stalled(*args: Any, **options: Any) -> Any:
        if not reached.exists():
            reached.touch()
            wait_for_go()
        return called(*args, **options)

    def execute_slowly(*args: Any) -> Any:
        if not go.exists():
            time.sleep(STEP)
        if reached.exists():
            wait_for_go()
        return execute(*args)

    setattr(kind, name, stalled)
    BlockExecutor.execute = execute_slowly  # type: ignore[method-assign]
    COPY_RATES["cpu"] = 1.0


if __name__ == "__main__":
    method, folder, *sys.argv[1:] = sys.argv[1:]
    stall(method, Path(folder))
    main()
