"""PageTable: the pages of every running sequence as one int32 array that a step's inputs are cut from."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxserve.kvcache.pages import NULL_PAGE


class PageTable:
    """int32[slots, width]: row = slot of a running sequence, column = page number within the sequence."""

    def __init__(self, slots: int, width: int):
        self.rows = np.zeros((slots, width), np.int32)  # NULL_PAGE: memory is taken when a row is first used
        self._free = list(range(slots - 1, -1, -1))

    @property
    def width(self) -> int:
        return self.rows.shape[1]

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take_slot(self, pages: Sequence[int]) -> int:
        """A free slot whose row starts with `pages`. Mutates."""
        slot = self._free.pop()
        self.rows[slot, : len(pages)] = pages
        return slot

    def append(self, slot: int, start: int, pages: Sequence[int]) -> None:
        """Writes `pages` from column `start` on. Mutates."""
        self.rows[slot, start : start + len(pages)] = pages

    def replace_pages(self, moves: Mapping[int, int]) -> None:
        """Writes each value of `moves` in place of its key, in all rows. Mutates."""
        names = np.arange(max(self.rows.max(), *moves, NULL_PAGE) + 1, dtype=np.int32)
        names[list(moves)] = list(moves.values())
        self.rows[:] = names[self.rows]

    def give_slot(self, slot: int) -> None:
        """Frees a slot. Mutates."""
        self.rows[slot] = NULL_PAGE
        self._free.append(slot)
