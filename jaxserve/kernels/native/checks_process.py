"""The process that runs the checks of native kernels: `checks_process.py LIBRARY FIRST SECONDS`.

It says `begin NAME` before each check from the index FIRST on, `error NUMBER` after it, and `end` at the end. A check
that computes for more than SECONDS ends it by SIGPROF. It is a script without imports of jaxserve, so that it starts
quickly.
"""

import ctypes
import os
import resource
import signal
import sys


def main() -> None:
    """Run the checks."""
    path, first, seconds = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a kernel that crashes leaves no file
    library = ctypes.CDLL(path)
    library.jaxserve_checks.restype = ctypes.c_int64
    library.jaxserve_check_name.argtypes = [ctypes.c_int64, ctypes.c_char_p, ctypes.c_size_t]
    library.jaxserve_check.argtypes, library.jaxserve_check.restype = [ctypes.c_int64], ctypes.c_double
    name = ctypes.create_string_buffer(200)
    for index in range(int(first), library.jaxserve_checks()):
        library.jaxserve_check_name(index, name, len(name))
        say("begin " + name.value.decode())
        signal.setitimer(signal.ITIMER_PROF, float(seconds))
        error = library.jaxserve_check(index)
        signal.setitimer(signal.ITIMER_PROF, 0)
        say(f"error {error!r}")
    say("end")


def say(line: str) -> None:
    """Write a line at once."""
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main()
