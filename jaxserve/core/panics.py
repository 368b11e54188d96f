"""Panics of libraries that are written in Rust.

In Python a panic is no `Exception`, so it would end the thread in which it is raised, whatever that thread works for.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class LibraryPanicked(Exception):
    """A panic in a library that is written in Rust: a fault of the library, which nevertheless can go on."""


@contextmanager
def panics_as_exceptions() -> Iterator[None]:
    """Raise `LibraryPanicked`, an ordinary exception, for a panic in the body of the `with` statement."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # each library has a class of its own of this name
            raise
        raise LibraryPanicked(str(error)) from error
