"""The split of an instance's requests into sides, which become instances of their own and keep their KV pages.

Each side gets the pages q of the split pool with q % sides == side (`PagePool.parted`).
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from jaxserve.core.request import Sequence, SequenceStatus
from jaxserve.kvcache import PagePool, Round, moves_to_sides

Requests = Mapping[str, Iterable[Sequence]]  # the unfinished sequences of each request, by id


@dataclass(frozen=True)
class SideLimits:
    """What each side can hold."""

    pages: int  # with the null page
    slots: int  # running sequences
    tokens: int  # of one sequence, prompt included


@dataclass(frozen=True)
class Partition:
    """The side of each request, and the page moves after which it finds its pages there."""

    sides: Mapping[str, int]  # by request id
    rounds: tuple[Round, ...]
    recompute: tuple[str, ...]  # requests that give their KV up, because no side has room for it; least cost first
    too_long: tuple[str, ...]  # requests that no side can hold. They have no side

    def carry_out(self, pool: PagePool, requests: Requests, move: Callable[[Mapping[int, int]], None]) -> None:
        """Move the pages of detached requests, in the pool, in their lists of pages and, by `move`, on the device.

        The requests in `recompute` and `too_long` have given their pages back. `move` gets the source and the target of
        each page of a round, whose order does not matter. If it raises, the rounds before are done and the rest not:
        the pool and all requests are as consistent as before.
        """
        for moves in self.rounds:
            move({each.source: each.target for each in moves})
            targets = {(each.source, side): each.target for each in moves for side in each.sides}
            references: Counter[tuple[int, int]] = Counter()
            for request_id, side in self.sides.items():
                for sequence in requests[request_id]:
                    assert sequence.slot < 0, f"sequence {sequence.id} is not detached"
                    pages = [targets.get((page, side), page) for page in sequence.pages]
                    references.update((a, b) for a, b in zip(sequence.pages, pages, strict=True) if a != b)
                    sequence.pages = pages
            pool.relocate((source, target, count) for (source, target), count in references.items())


@dataclass(frozen=True)
class _Unit:
    """Requests that go to one side together."""

    ids: tuple[str, ...]
    pages: frozenset[int]
    sequences: int
    running: int

    @classmethod
    def of(cls, requests: Mapping[str, list[Sequence]], ids: Iterable[str]) -> "_Unit":
        ids = tuple(ids)
        sequences = [sequence for request_id in ids for sequence in requests[request_id]]
        pages = frozenset(page for sequence in sequences for page in sequence.pages)
        running = sum(sequence.status is SequenceStatus.RUNNING for sequence in sequences)
        return cls(ids, pages, len(sequences), running)

    @property
    def size(self) -> tuple[int, int]:
        return len(self.pages), self.sequences


@dataclass
class _Side:
    """A side while requests are given to it."""

    index: int
    pages: set[int] = field(default_factory=set)
    sequences: int = 0
    running: int = 0
    ids: list[str] = field(default_factory=list)

    def has_room(self, unit: _Unit, limits: SideLimits) -> bool:
        return self.pages_with(unit) < limits.pages and self.running + unit.running <= limits.slots

    def pages_with(self, unit: _Unit) -> int:
        """Return the number of pages after `take`."""
        return len(self.pages) + len(unit.pages - self.pages)

    def take(self, unit: _Unit) -> None:
        self.pages |= unit.pages
        self.sequences += unit.sequences
        self.running += unit.running
        self.ids += unit.ids


def partition(requests: Requests, pool: PagePool, sides: int, limits: SideLimits) -> Partition:
    """Return the side of each request, all of whose answers stay together, and the page moves.

    Sides get about the same number of pages, and then of sequences. Requests that share pages go to one side together
    if that leaves the sides balanced. Otherwise each side gets a copy of the shared pages.
    """
    all_requests = {request_id: list(sequences) for request_id, sequences in requests.items()}
    too_long = {
        request_id
        for request_id, sequences in all_requests.items()
        if any(len(sequence.tokens) >= limits.tokens < sequence.max_total for sequence in sequences)
    }
    fitting = {request_id: each for request_id, each in all_requests.items() if request_id not in too_long}
    made, left_over = _choose_sides(fitting, sides, limits)
    holders: dict[int, frozenset[int]] = {}
    for side in made:
        alone = frozenset((side.index,))
        for page in side.pages:
            holders[page] = holders[page] | alone if page in holders else alone
    return Partition(
        {request_id: side.index for side in made for request_id in side.ids},
        moves_to_sides(pool, holders, sides, limits.pages),
        tuple(request_id for unit in sorted(left_over, key=lambda unit: unit.size) for request_id in unit.ids),
        tuple(sorted(too_long)),
    )


def _choose_sides(
    requests: Mapping[str, list[Sequence]], sides: int, limits: SideLimits
) -> tuple[list[_Side], list[_Unit]]:
    """Return the sides with their requests, and those of these requests that have to give up their pages."""
    made = [_Side(index) for index in range(sides)]
    units, left_over = deque(_units(requests, sides)), []
    while units:
        unit = units.popleft()
        with_room = [side for side in made if side.has_room(unit, limits)]
        if with_room:
            min(with_room, key=lambda side: _load(side, unit, sides)).take(unit)
        elif len(unit.ids) > 1:
            singles = [_Unit.of(requests, (request_id,)) for request_id in unit.ids]
            units = deque(sorted((*units, *singles), key=lambda unit: unit.size, reverse=True))
        else:
            left_over.append(unit)
    for unit in left_over:
        without_pages = _Unit(unit.ids, frozenset(), unit.sequences, 0)
        min(made, key=lambda side: _load(side, without_pages, sides)).take(without_pages)
    return made, left_over


def _load(side: _Side, unit: _Unit, sides: int) -> tuple[int, ...]:
    """Return by what sides are compared that could take a unit.

    That is what the side would then hold, and how many pages would have to move. Units without pages go by sequences.
    """
    if not unit.pages:
        return side.sequences, len(side.pages), side.index
    moved = sum(page % sides != side.index for page in unit.pages)
    return side.pages_with(unit), side.sequences + unit.sequences, moved, side.index


def _units(requests: Mapping[str, list[Sequence]], sides: int) -> list[_Unit]:
    """Return the requests, the largest first. Those that share pages are a unit, up to a side's share of all pages."""
    singles = [_Unit.of(requests, (request_id,)) for request_id in requests]
    share = len(frozenset[int]().union(*(unit.pages for unit in singles))) / sides
    units: list[_Unit] = []
    for group in _connected(singles):
        whole = _Unit.of(requests, (request_id for unit in group for request_id in unit.ids))
        units += [whole] if len(whole.pages) <= share else group
    return sorted(units, key=lambda unit: unit.size, reverse=True)


def _connected(units: list[_Unit]) -> list[list[_Unit]]:
    """Return groups of units in which each shares a page with another one, directly or through others."""
    leader = list(range(len(units)))  # of each unit: itself, or another one of the same group
    first: dict[int, int] = {}  # for each page, the first unit that holds it

    def find(unit: int) -> int:
        while leader[unit] != unit:
            leader[unit] = unit = leader[leader[unit]]
        return unit

    for number, unit in enumerate(units):
        for page in unit.pages:
            other = first.setdefault(page, number)
            if other != number:
                leader[find(number)] = find(other)
    groups: defaultdict[int, list[_Unit]] = defaultdict(list)
    for number, unit in enumerate(units):
        groups[find(number)].append(unit)
    return list(groups.values())
