"""Actuator: the second of the two places with side effects, as the control plane sees it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxserve.control.transitions import Transition

# Seconds for which a smaller pool waits for pages in use, and from try to try. Not long: no policy is asked meanwhile,
# even if a burst has come.
PATIENCE, TRY_AGAIN = 0.3, 0.02


@dataclass(frozen=True)
class Outcome:
    """How a transition ended: `error` says why it failed, and then nothing of it is in force.

    `seconds` are those of all that were put in force with it.
    """

    transition: Transition
    error: str | None
    seconds: float


class Actuator(Protocol):
    """Carries transitions out in order, batch after batch (`transitions.batches`), while steps go on."""

    @property
    def busy(self) -> bool:
        """Whether a transition is still to end. When not, `poll` has all outcomes."""
        ...

    def start(self, transitions: Sequence[Transition]) -> None:
        """Begins, and returns at once; only called when not busy. After a transition that fails the rest is dropped."""
        ...

    def poll(self) -> Sequence[Outcome]:
        """What has ended since the last call, in order."""
        ...
