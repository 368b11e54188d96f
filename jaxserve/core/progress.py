"""Progress: how an engine that starts tells how far it is."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""(what is being done, how many are done, of how many). Called from any thread, often; it must return at once."""

READING, QUANTISING = "reading weights", "quantising weights"
LOADING, COMPILING = "loading compiled programs", "compiling programs"


def ignore_progress(doing: str, done: int, total: int) -> None:
    """The progress of which nobody wants to know."""
