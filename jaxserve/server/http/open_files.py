"""The process's limit of open files, which also limits the number of connections."""

import logging
import sys

logger = logging.getLogger(__name__)

# File descriptors for other purposes than connections: checkpoints, logs, caches.
RESERVED = 128


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard limit."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError) as error:  # macOS has a lower system-wide limit
            logger.info("the limit of open files stays at %d: %s", soft, error)


def max_connections() -> int:
    """Return the number of connections that the limit of open files allows."""
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(soft - RESERVED, soft // 2)


def warn_if_few(needed: int) -> None:
    """Log a warning if the limit of open files allows fewer than `needed` connections."""
    if (possible := max_connections()) < needed:
        logger.warning(
            "the limit of open files allows %d connections, fewer than the %d requests that may be queued "
            "(--max-queued-requests): raise it with ulimit -n",
            possible,
            needed,
        )
