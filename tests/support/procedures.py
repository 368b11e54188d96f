"""A driver of procedures of `control` for tests, without threads."""

from collections.abc import Callable
from typing import Any

from jaxserve.control.transitions import Beside, Waits


def drive(procedure: Waits[None], wait_for: Callable[[Any], Any]) -> None:
    """Run a procedure and all that begin beside it to their ends, each up to its next wait in turn.

    `wait_for` waits for what they yield, and returns the wait's value.
    """
    running: list[tuple[Waits[None], Any, Exception | None]] = [(procedure, None, None)]
    while running:
        current, value, error = running.pop(0)
        try:
            wait = current.send(value) if error is None else current.throw(error)
        except StopIteration:
            continue
        value = error = None
        try:
            if isinstance(wait, Beside):
                running.append((wait.procedure, None, None))
            else:
                value = wait_for(wait)
        except Exception as failure:
            error = failure
        running.append((current, value, error))
