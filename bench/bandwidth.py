"""The speed at which memory can be read: `python -m bench.bandwidth [--threads N]`.

This is the ceiling for decode steps and for products of few rows. Each thread reads its own memory, too large for
caches, in several streams, by a loop in C++ that does nothing else. The loop is compiled on the machine where it runs.
There is no fallback, because a ceiling that is too low would flatter what it is compared with.
"""

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_suffix(".cc")
SIZE = 256 << 20  # bytes per thread
PASSES = 30  # about one second in total
Read = Callable[[np.ndarray], int]


@dataclass(frozen=True)
class Bandwidth:
    """The rate (GB/s) at which all threads together read memory: in the median pass, and in the best one."""

    median: float
    best: float

    def share(self, size: float, seconds: float) -> float:
        """Return the rate of reading `size` bytes in `seconds` as a share of the median: 1.0 is as fast as memory."""
        return 1e-9 * size / seconds / self.median


def measure(threads: int, size: int = SIZE, passes: int = PASSES, read: Read | None = None) -> Bandwidth:
    """Read `size` bytes in each thread, `passes` times, with the function `read` (by default `compiled()`).

    Raise OSError without a compiler, or subprocess.CalledProcessError if compilation fails.
    """
    read = read or compiled()
    arrays = [np.ones(size // 8, np.uint64) for _ in range(threads)]
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(passes):
            start = time.perf_counter()
            list(pool.map(read, arrays))
            rates.append(1e-9 * sum(array.nbytes for array in arrays) / (time.perf_counter() - start))
    return Bandwidth(statistics.median(rates), max(rates))


def compiled() -> Read:
    """Return the compiled loop as a function of an array uint64[N], which releases the interpreter's lock.

    Raise OSError without a compiler, or subprocess.CalledProcessError if compilation fails.
    """
    from jaxserve.kernels.native.build import FLAGS, compiler  # which loads JAX

    with tempfile.TemporaryDirectory(prefix="jaxserve-bandwidth-") as folder:
        library = Path(folder, "bandwidth.so")
        subprocess.run([*compiler(), *FLAGS, "-shared", SOURCE, "-o", library], check=True)
        function = ctypes.CDLL(str(library)).jaxserve_read
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint64
    return lambda array: function(array.ctypes.data, array.size)


def main() -> None:
    """Print the measured bandwidth."""
    from bench.peers.worker import limit_threads

    parser = argparse.ArgumentParser(prog="python -m bench.bandwidth", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    limit_threads(args.threads)
    print(sentence(measure(args.threads), args.threads))


def sentence(found: Bandwidth, threads: int) -> str:
    """Return the measured bandwidth in words."""
    return f"memory is read at {found.median:.1f} GB/s by {threads} threads (median pass; the best {found.best:.1f})"


if __name__ == "__main__":
    main()
