"""`python -m jaxserve.kernels.native`: compile the native kernels, or report why that failed."""

import argparse
import os
import sys

from jaxserve.kernels.native.build import HERE, build_or_report, cache_folder


def main() -> int:
    """Compile the kernels and return the exit status. With --optional a failure is only a message."""
    parser = argparse.ArgumentParser(description="Compile jaxserve's native CPU kernels.")
    parser.add_argument("--optional", action="store_true", help="succeed even if the kernels cannot be built")
    optional = parser.parse_args().optional
    library = build_or_report(HERE if os.access(HERE, os.W_OK) else cache_folder())  # engines search both folders
    if library is not None:
        sys.stdout.write(f"{library}\n")
    return 0 if library is not None or optional else 1


if __name__ == "__main__":
    sys.exit(main())
