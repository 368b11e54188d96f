"""The page moves before a pool is parted: afterwards each side finds the pages of its sequences under its own ids."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.kvcache.pages import PagePool


@dataclass(frozen=True)
class PageMove:
    """A copy of a page to an unused one, which the sequences of some sides hold from then on instead of the source."""

    source: int
    target: int
    sides: frozenset[int]


Round = tuple[PageMove, ...]  # moves without an order: no target is in use before it, and no two have the same source


def moves_to_sides(
    pool: PagePool, holders: Mapping[int, frozenset[int]], sides: int, pages_per_side: int
) -> tuple[Round, ...]:
    """Return the moves after which each side holds only pages q with q % sides == side.

    `holders`: for each page in use, the sides whose sequences hold it. A page of several sides is copied, so that each
    has its own. Pages that are not among them count as unused. Page ids end below sides * `pages_per_side`, and pages 0
    to sides - 1 become unused. Each side must hold less than `pages_per_side` pages. Cached pages are the last that are
    overwritten.
    """
    return _Planner(pool, holders, sides, pages_per_side).rounds()


class _Planner:
    """The state of the pages while rounds of moves are planned."""

    def __init__(self, pool: PagePool, holders: Mapping[int, frozenset[int]], sides: int, pages_per_side: int):
        self._sides, self._end = sides, sides * pages_per_side
        self._alone = [frozenset((side,)) for side in range(sides)]
        self._holders = dict(holders)
        # Unused pages of each side, and those that no side has. Pages whose holders give them up come last, as they
        # will be the most recently released.
        self._unused: list[deque[int]] = [deque() for _ in range(sides)]
        self._spare: deque[int] = deque()
        given_up = (page for page in range(1, pool.num_pages) if pool.references(page) and page not in self._holders)
        for page in (*pool.unused, *given_up):
            self._unused_beside(page).append(page)
        self._misplaced = {page for page in self._holders if self._missing(page)}

    def rounds(self) -> tuple[Round, ...]:
        """Return all moves."""
        rounds = []
        while self._misplaced:
            # Without a direct move every side that pages wait for is full, so that a page of another side leaves it.
            moves = self._direct_moves() or [self._move_out_of_the_way()]
            for move in moves:
                self._release(move)
            rounds.append(tuple(moves))
        return tuple(rounds)

    def _missing(self, page: int) -> frozenset[int]:
        """Return the sides that hold a page and do not find it under an id of theirs."""
        holding = self._holders[page]
        return holding - self._alone[page % self._sides] if self._has_place(page) else holding

    def _has_place(self, page: int) -> bool:
        """Return whether a page belongs to a side after the split."""
        return self._sides <= page < self._end

    def _unused_beside(self, page: int) -> deque[int]:
        """Return the unused pages of the side that a page belongs to, or those without a side."""
        return self._unused[page % self._sides] if self._has_place(page) else self._spare

    def _direct_moves(self) -> list[PageMove]:
        """Move each misplaced page, for one of its sides, to an unused page of this side if there is one."""
        moves = []
        for page in sorted(self._misplaced):
            side = min((side for side in self._missing(page) if self._unused[side]), default=None)
            if side is not None:
                moves.append(PageMove(page, self._unused[side].popleft(), self._alone[side]))
        return moves

    def _move_out_of_the_way(self) -> PageMove:
        """Move a page that lies on a full side, and that this side does not hold, to any unused page."""
        full = {side for page in self._misplaced for side in self._missing(page)}
        foreign = (page for page in self._misplaced if page % self._sides not in self._holders[page])
        page = min(page for page in foreign if self._has_place(page) and page % self._sides in full)
        unused = self._spare or next(pages for pages in self._unused if pages)
        return PageMove(page, unused.popleft(), self._holders[page])

    def _release(self, move: PageMove) -> None:
        """Take note of a move that has been made."""
        self._holders[move.target] = move.sides
        staying = self._holders.pop(move.source) - move.sides
        if staying:
            self._holders[move.source] = staying
        else:
            self._unused_beside(move.source).appendleft(move.source)
        for page in (move.source, move.target):
            self._misplaced.discard(page)
            if page in self._holders and self._missing(page):
                self._misplaced.add(page)
