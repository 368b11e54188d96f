"""The process that times products: `times_process.py LIBRARY SECONDS TOTAL LEFT_OUT [INDEX...]`.

It writes a line for each product: its index, and what `time_matmul.cc` says of it. SECONDS is the time for each, and
TOTAL that after which no further product begins. LEFT_OUT are names of checks, by newlines, of kernels that may not
run. Without an INDEX all products are timed. It is a script without imports of jaxserve, so that it starts quickly.
"""

import ctypes
import os
import resource
import sys
import time


def main() -> None:
    """Time the products."""
    path, seconds, total, left_out, *chosen = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    library = ctypes.CDLL(path)
    library.jaxserve_timed_products.restype = ctypes.c_int64
    library.jaxserve_time_product.argtypes = [ctypes.c_int64, ctypes.c_double, ctypes.c_char_p, ctypes.c_size_t]
    for name in filter(None, left_out.split("\n")):
        library.jaxserve_leave_out(ctypes.c_char_p(name.encode()))
    line = ctypes.create_string_buffer(1000)
    indexes = map(int, chosen) if chosen else range(library.jaxserve_timed_products())
    end = time.monotonic() + float(total)
    for index in indexes:
        if time.monotonic() > end:
            break
        library.jaxserve_time_product(index, float(seconds), line, len(line))
        os.write(1, f"{index} {line.value.decode()}\n".encode())


if __name__ == "__main__":
    main()
