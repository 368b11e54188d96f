"""Checks of the native kernels on this processor, before they serve.

Compilers and processors that no developer has may break a kernel: it computes nonsense, ends the process or never
returns. So each kernel that this processor can run first computes small random problems, in a process of its own
(`checks_process.py`), beside plain loops in double precision (`check.h`). What fails is left out, and the next best
variant serves. The outcome is kept in a file for each library and processor (`kept.py`).

An endless kernel is recognised by its processor time, because other processes may slow any kernel down. A check that
waits for too long all the same, lacks memory or is ended from outside is not remembered: the next start repeats it.
"""

import ctypes
import logging
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxserve.kernels.native.build import HERE
from jaxserve.kernels.native.kept import keep, processor, read

PROCESSOR_TIME = 5.0  # seconds that a check may compute; it takes 1 to 60 ms, and 20 times as long on an emulator
PATIENCE = 30.0  # seconds that a check may take on a busy machine
# Signals by which users and limits of memory and time end processes.
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Check:
    """The result of a kernel's check."""

    name: str  # kernel, variant, precision
    result: str  # "right", or what is wrong
    error: float | None = None  # the largest error as a share of the allowed one
    final: bool = True  # whether a repetition would give the same

    @property
    def right(self) -> bool:
        """True if the kernel may serve."""
        return self.result == "right"


def checked(library: Path, identity: str | None = None) -> tuple[Check, ...]:
    """Return the checks of a library's kernels on this processor, which run unless their outcome is kept in a file.

    Each kernel that is not right is named in a line of the log. `identity` stands for the processor. Raise OSError if
    the checks cannot run.
    """
    identity = processor() if identity is None else identity
    checks = _read(library, identity) or run_and_keep(library, identity)
    for check in checks:
        if not check.right:
            log.warning("native CPU kernel left out (%s): it %s on this processor", check.name, check.result)
    return checks


def run_and_keep(library: Path, identity: str | None = None) -> tuple[Check, ...]:
    """Return the results of all checks of a library, after keeping them in a file. Raise OSError as `run_checks`."""
    checks = run_checks(library)
    _keep(library, processor() if identity is None else identity, checks)
    return checks


def run_checks(library: Path) -> tuple[Check, ...]:
    """Return the results of all checks of a library.

    After a kernel that is not right the others run in a new process: it may have ended or blocked its own, or have
    written to memory of others. Raise OSError if the checks cannot run.
    """
    checks: list[Check] = []
    while not _run_on(library, checks):
        pass
    return tuple(checks)


def _run_on(library: Path, checks: list[Check]) -> bool:
    """Run the checks that follow those in the list, and append their results up to the first that is not right.

    Return whether these were the last ones.
    """
    script = [str(HERE / "checks_process.py"), str(library), str(len(checks)), str(PROCESSOR_TIME)]
    command = [sys.executable, "-I", "-S", *script]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    name = ""
    try:
        for line in lines_of(process):
            if line is None:
                checks.append(Check(name, f"did not return within {PATIENCE:g} s", final=False))
                return False
            said, _, rest = line.partition(" ")
            if said == "begin":
                name = rest
            elif said == "error":
                checks.append(_computed(name, float(rest)))
                name = ""
                if not checks[-1].right:
                    return False
            elif said == "end":
                return True
        if not name:
            raise OSError(f"the process that checks {library} ended with status {process.wait()}")
        checks.append(_ended(name, process.wait()))
        return False
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _computed(name: str, error: float) -> Check:
    """Return the check of a kernel with this error as a share of the allowed one; negative: there was no memory."""
    if error < 0:
        return Check(name, "finds too little memory for its check", final=False)
    return Check(name, "right" if error <= 1 else "computes wrong results", error)


def lines_of(process: subprocess.Popen) -> Iterator[str | None]:
    """Yield the lines that a process writes, or None and nothing more if the next one takes too long."""
    assert process.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(PATIENCE):
                yield None
                return
            some = os.read(process.stdout.fileno(), 1 << 16)
            if not some:
                return
            *lines, rest = (rest + some).split(b"\n")
            yield from (line.decode() for line in lines)


def _ended(name: str, status: int) -> Check:
    """Return the check in which a process ended."""
    if status == -signal.SIGPROF:
        return Check(name, f"does not return within {PROCESSOR_TIME:g} s")
    result = f"ends the process with status {status}"
    with suppress(ValueError):
        result = f"ends the process by {signal.Signals(-status).name}"
    return Check(name, result, final=-status not in FROM_OUTSIDE)


def kernels(library: Path) -> list[str]:
    """Return the names of a library's kernels that this processor can run, as their checks have them."""
    loaded = ctypes.CDLL(str(library))
    loaded.jaxserve_checks.restype = ctypes.c_int64
    name = ctypes.create_string_buffer(200)
    names = []
    for index in range(loaded.jaxserve_checks()):
        loaded.jaxserve_check_name(ctypes.c_int64(index), name, ctypes.c_size_t(len(name)))
        names.append(name.value.decode())
    return names


def _read(library: Path, identity: str) -> tuple[Check, ...]:
    """Return the checks that a file keeps of this very library and processor, or none.

    The file must have all kernels that can run here, which it may lack if it is damaged, or if an emulator or the
    system hides instruction sets.
    """
    for kept in read(library, identity):
        with suppress(KeyError, TypeError):
            checks = tuple(Check(**check) for check in kept["checks"])
            if [check.name for check in checks] == kernels(library):
                return checks
    return ()


def _keep(library: Path, identity: str, checks: tuple[Check, ...]) -> None:
    """Write the checks to the first folder that can be written, if all are final."""
    if checks and all(check.final for check in checks):
        keep(library, identity, {"checks": [asdict(check) for check in checks]})


def table(checks: tuple[Check, ...]) -> str:
    """Return the checks as a table for people."""
    rows = [("kernel", "variant", "precision", "result", "error / allowed")]
    for check in checks:
        kernel, variant, precision = check.name.split(", ", 2)
        rows.append((kernel, variant, precision, check.result, "" if check.error is None else f"{check.error:.3f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows) + "\n"
