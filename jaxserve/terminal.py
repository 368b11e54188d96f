"""What the commands share: where they speak to the user, and how they tell an error."""

import contextlib
from collections.abc import Iterator

import typer
from rich.console import Console

from jaxserve.core.errors import JaxserveError

console = Console(stderr=True, highlight=False)


@contextlib.contextmanager
def told_errors() -> Iterator[None]:
    """Turns errors that jaxserve raises on purpose into one line and exit status 1."""
    try:
        yield
    except JaxserveError as error:
        console.print(f"jaxserve: {error}", style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
