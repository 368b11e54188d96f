"""`python -m jaxserve.kernels.native`: compile the native kernels, or report why that failed; check and time them."""

import argparse
import os
import sys

from jaxserve.kernels.native import choices
from jaxserve.kernels.native.build import HERE, build_or_report
from jaxserve.kernels.native.checks import run_and_keep, table


def main() -> int:
    """Compile the kernels and return the exit status. With --optional a failure is only a message."""
    parser = argparse.ArgumentParser(description="Compile jaxserve's native CPU kernels.")
    parser.add_argument("--optional", action="store_true", help="succeed even if the kernels cannot be built")
    parser.add_argument(
        "--check", action="store_true", help="check every kernel on this processor, time products, and print tables"
    )
    arguments = parser.parse_args()
    library = build_or_report(HERE if os.access(HERE, os.W_OK) else None)  # engines search both folders
    if library is None:
        return 0 if arguments.optional else 1
    sys.stdout.write(f"{library}\n")
    if not arguments.check:
        return 0
    try:
        checks = run_and_keep(library)
    except OSError as error:
        sys.stderr.write(f"the native CPU kernels cannot be checked, plain XLA is used instead: {error}\n")
        return 1
    sys.stdout.write(table(checks))
    timings = choices.time_and_keep(library, [check.name for check in checks if not check.right])
    if timings:
        sys.stdout.write("\n" + choices.table(timings))
    return 0 if all(check.right for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
