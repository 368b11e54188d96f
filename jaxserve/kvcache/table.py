"""The page table: the KV pages of all running sequences, from which the inputs of steps are cut."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxserve.kvcache.lanes import ONE_LANE, Lanes
from jaxserve.kvcache.pages import NULL_PAGE


class PageTable:
    """A table int32 [slots, width] of places: one row per running sequence, one column per page of a sequence.

    A place is what kernels take as a page's id (`kvcache.lanes`). Methods take page ids.
    """

    def __init__(self, slots: int, width: int, lanes: Lanes = ONE_LANE):
        """Make a table of null pages. `lanes` are those of the pools."""
        self.lanes = lanes
        self.rows = np.zeros((slots, width), np.int32)  # NULL_PAGE; a row takes memory at first use
        self._free = list(range(slots - 1, -1, -1))

    @property
    def width(self) -> int:
        """Number of pages that a sequence can have."""
        return self.rows.shape[1]

    @property
    def free_slots(self) -> int:
        """Number of slots without a sequence."""
        return len(self._free)

    def take_slot(self, pages: Sequence[int]) -> int:
        """Take a free slot, write `pages` to the start of its row, and return it."""
        slot = self._free.pop()
        self.rows[slot, : len(pages)] = self.lanes.places(pages)
        return slot

    def append(self, slot: int, start: int, pages: Sequence[int]) -> None:
        """Write `pages` into a row from column `start` on."""
        self.rows[slot, start : start + len(pages)] = self.lanes.places(pages)

    def replace_pages(self, moves: Mapping[int, int]) -> None:
        """Replace each page that is a key of `moves` by its value, in all rows."""
        sources = self.lanes.places(list(moves))
        new_places = np.arange(max(self.rows.max(), sources.max(initial=NULL_PAGE)) + 1, dtype=np.int32)
        new_places[sources] = self.lanes.places(list(moves.values()))
        self.rows[:] = new_places[self.rows]

    def give_slot(self, slot: int) -> None:
        """Free a slot and clear its row."""
        self.rows[slot] = NULL_PAGE
        self._free.append(slot)
