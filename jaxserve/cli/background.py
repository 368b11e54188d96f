"""The process in which a server prepares its model while it is idle: `python -m jaxserve.cli.background JSON`.

It yields to everything else on the machine, uses one processor and no accelerator, and ends with the server.
"""

import ctypes
import fcntl
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.core.errors import JaxserveError

if TYPE_CHECKING:
    pass

LOCK = "background.lock"
LIBC_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def main() -> None:
    """Do what the server wants, which the only argument describes, and exit with one line on an error."""
    described = json.loads(sys.argv[1])
    yield_to_others(described.pop("parent"))
    try:
        run(**described)
    except (JaxserveError, OSError, MemoryError) as error:
        sys.exit(str(error))


def yield_to_others(parent: int) -> None:
    """Give this process the lowest priority, one processor and the first place when memory runs out.

    It is killed when the process with the id `parent` ends.
    """
    with suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(LIBC_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the server has ended")
    with suppress(OSError):
        os.nice(19)
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def run(wanted: dict[str, Any]) -> None:
    """Prepare and measure what a server wants, unless another process has done so meanwhile."""
    folder = Path(wanted["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the process ends; waits for that of another server
        from jaxserve.calibration.background import Wanted, missing, prepare
        from jaxserve.checkpoint import open_checkpoint
        from jaxserve.checkpoint.kept import make_room
        from jaxserve.cli.own_text import sampler
        from jaxserve.compilation.cache import use_persistent_cache
        from jaxserve.console.progress import ignore_phases
        from jaxserve.core.config import EngineConfig
        from jaxserve.engine.model_tokenizer import load_tokenizer

        make_room(folder)
        chosen = Wanted.of(wanted)
        checkpoint = open_checkpoint(chosen.model).in_dtype(chosen.dtype)
        if missing(chosen, checkpoint):
            use_persistent_cache(None)
            config = EngineConfig(model=chosen.model, tokenizer=chosen.tokenizer)
            tokenizer = load_tokenizer(config, checkpoint.path, checkpoint.config.vocab_size)
            prepare(chosen, checkpoint, tokenizer, sampler(checkpoint.path, ignore_phases))


if __name__ == "__main__":
    main()
