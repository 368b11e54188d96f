"""Moves of requests between stopped instances, each of which can be undone."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from jaxserve.control.costs import InstanceCost
from jaxserve.control.transitions import PlannedCore
from jaxserve.core.numeric import round_up
from jaxserve.core.step_load import StepLoad
from jaxserve.kvcache import PagePool


class MovableCore(PlannedCore, Protocol):
    """What a move of requests needs of an engine core. The state of a request is opaque, except for its sequences."""

    capacity: int  # tokens, prompt included, that the instance promises to hold of a sequence

    @property
    def unfinished(self) -> Mapping[str, Any]:
        """The unfinished sequences of each unfinished request."""
        ...

    def detach(self, request_ids: Collection[str] | None = None, *, keep_pages: bool = True) -> list[Any]:
        """Take requests out, by default all; their pages stay referenced, or are given back."""
        ...

    def attach(self, states: Sequence[Any], pages: Callable[[int], int] | None, now: float) -> None:
        """Take requests in. `pages` returns the id here of each of their pages; None: KV is computed again."""
        ...

    def withhold(self, pages: Collection[int]) -> None:
        """Hold pages that are on their way, and the sequences that have them."""
        ...

    def arrive(self, pages: Collection[int]) -> None:
        """End the hold on pages that have come."""
        ...

    def lose(self, now: float) -> None:
        """Let all that had pages on their way be computed again."""
        ...


class GroupedInstance(Protocol):
    """An instance as a regroup sees it."""

    @property
    def core(self) -> MovableCore: ...


class RequestMoves:
    """Moves of requests while their instances are stopped. What reverses each of them is put into `undo`."""

    def __init__(self, undo: ExitStack, now: float):
        self._undo, self._now = undo, now

    def take(self, core: MovableCore, ids: Collection[str] | None = None, *, keep_pages: bool = True) -> list[Any]:
        """Take requests out of a core, by default all, and return them. Their pages stay referenced, or are given back.

        To undo that, they go back with the pages that they have then.
        """
        states = core.detach(ids, keep_pages=keep_pages)
        back = _same if keep_pages else None
        self._undo.callback(lambda: core.attach(states, back, self._now))
        return states

    def give(
        self,
        core: MovableCore,
        states: Sequence[Any],
        pages: Callable[[int], int] | None,
        back: Callable[[int], int] = lambda page: page,
    ) -> None:
        """Give requests to a core. `back` is the reverse of `pages`."""

        def take_back() -> None:
            core.detach([state.request.id for state in states])
            for sequence in _sequences(states):
                sequence.pages = [back(page) for page in sequence.pages]

        core.attach(states, pages, self._now)
        self._undo.callback(take_back)

    def copy(
        self,
        source: GroupedInstance,
        targets: Sequence[GroupedInstance],
        copy: Callable[[Any, Mapping[int, int]], None],
        copy_seconds: Callable[[int], float],
    ) -> list[Any]:
        """Move all requests of an instance to others, and return those that none of these can hold.

        `copy(target, pages)` copies pages of the source (source: target), which takes `copy_seconds(number)`. A request
        goes to the instance with most free pages. Its KV is computed again if this instance has no room for it, or if
        that takes less time.
        """
        homeless: list[Any] = []
        for request_id, sequences in list(source.core.unfinished.items()):
            need = max(len(sequence.tokens) + 1 for sequence in sequences)
            able = [target for target in targets if target.core.capacity >= need]
            if not able:
                homeless += self.take(source.core, [request_id], keep_pages=False)
                continue
            held = Counter(page for sequence in sequences for page in sequence.pages)
            target = max(able, key=lambda target: target.core.scheduler.pages.available)
            scheduler = target.core.scheduler
            room = scheduler.pages.available - len(scheduler.running)
            has_room = len(held) <= room and len(sequences) <= scheduler.table.free_slots
            tokens = sum(sequence.num_computed for sequence in sequences)
            again = recompute_seconds(target.core.cost, tokens, scheduler.limits.tile)
            if not held or not has_room or (again is not None and again < copy_seconds(len(held))):
                self.give(target.core, self.take(source.core, [request_id], keep_pages=False), None)
                continue
            states = self.take(source.core, [request_id])
            moved = self._allocate(scheduler.pages, held)
            copy(target, moved)
            back = {new: old for old, new in moved.items()}
            self.give(target.core, states, moved.__getitem__, back.__getitem__)
        return homeless

    def _allocate(self, pool: PagePool, held: Counter[int]) -> dict[int, int]:
        """Return a new page for each page held, with as many references."""
        new = pool.allocate(len(held))
        again = [page for page, count in zip(new, held.values(), strict=True) for _ in range(count - 1)]
        pool.retain(again)
        self._undo.callback(lambda: pool.release([*new, *again]))
        return dict(zip(held, new, strict=True))


def recompute_seconds(cost: InstanceCost | None, tokens: int, tile: int) -> float | None:
    """Return the time (s) that computing the KV of a sequence again takes, or None if step times are unknown."""
    if cost is None:
        return None
    return cost.seconds(StepLoad(round_up(tokens, tile), 1, 1, 0, tokens * tokens + tokens))


def _same(page: int) -> int:
    return page


def _sequences(states: Sequence[Any]) -> list[Any]:
    return [sequence for state in states for sequence in state.unfinished_sequences]
