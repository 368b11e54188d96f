"""Progress reports of an engine that is starting."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""A function that is called with (activity, items done, items in all). It is called often and from any thread, and must
return at once."""

READING, QUANTISING = "reading weights", "quantising weights"
DOWNLOADING = "downloading"  # what it is follows; the items are bytes
LOADING, COMPILING = "loading compiled programs", "compiling programs"
COMPILING_UNKEPT = "compiling programs that cannot be kept"  # for want of a folder


def ignore_progress(doing: str, done: int, total: int) -> None:
    """Do nothing with a progress report."""
