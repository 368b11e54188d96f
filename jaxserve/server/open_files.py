"""The limit of open files, of which every connection is one."""

import logging
import sys

logger = logging.getLogger(__name__)

RESERVED = 128  # files that are not connections: checkpoints, logs, caches


def raise_limit() -> None:
    """Raise the process's limit of open files as far as its owner may."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError) as error:  # macOS has a lower limit of its own
            logger.info("the limit of open files stays at %d: %s", soft, error)


def max_connections() -> int:
    """Return how many connections the limit of open files leaves room for."""
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(soft - RESERVED, soft // 2)


def warn_if_few(needed: int) -> None:
    """Log a warning if fewer connections can be open than requests may wait."""
    if (possible := max_connections()) < needed:
        logger.warning(
            "the limit of open files leaves room for %d connections, fewer than the %d requests that may wait "
            "(--max-queued-requests): raise it with ulimit -n",
            possible,
            needed,
        )
