"""Canaries in KV pages: what a step has written stays unchanged as long as somebody holds it, wherever it moves.

The device takes a checksum of every token's keys and values in all layers before each step and around each move of
pages. The checksums are taken after the dispatched steps and compared one step later, so that nothing waits for them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from jaxserve.core.request import SequenceStatus
from jaxserve.core.work import PendingStep, Work
from jaxserve.engine.loop import StepLoop
from jaxserve.kvcache import NULL_PAGE
from tests.support.internals import cached_pages, hashes_of_pages, pages_of_hashes, requests_in, unused_pages

Slots = tuple[np.ndarray, np.ndarray]  # pages and the tokens within them
NOWHERE: Slots = (np.zeros(0, int), np.zeros(0, int))
WIDTHS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@jax.jit
def checksums(segment: Array) -> Array:
    """Return the checksums (u32[P, K, S]) of each token's bytes in a pool's segment [P, K, 2, S, R], on its devices."""
    words = lax.bitcast_convert_type(segment, WIDTHS[segment.dtype.itemsize]).astype(jnp.uint32)
    return (words * odd_numbers(jnp.uint32, 2, 1, segment.shape[-1])).sum((2, 4), dtype=jnp.uint32)


def odd_numbers(dtype: Any, *shape: int) -> np.ndarray:
    """Return factors with which a checksum depends on the place of each word, and changes with any single word."""
    return np.random.default_rng(0).integers(2**31, size=shape).astype(dtype) * 2 + 1


@dataclass
class Sight:
    """The checksums of all pages at a moment between two steps."""

    sums: list[list[Array]]  # checksums by layer and segment
    moved: Mapping[int, int]  # page -> its new place, for moves since the previous sight
    pages: int | None  # number of pages that existed at the previous sight too; None: all
    held: list[tuple[Any, int, int]] | None  # name, page and number of tokens of each holder; None: in change
    written: Slots  # what the following step writes; held tokens in these slots do not exist yet


@dataclass(eq=False)
class Canary:
    """A watch over an instance's pages until it is closed. `aside` are pages that the test itself holds."""

    steps: StepLoop
    aside: Sequence[int] = ()
    _sights: list[Sight] = field(default_factory=list)  # not verified yet
    _sums: np.ndarray | None = None  # u64[P, S] of the last verified sight
    _written: Slots = NOWHERE  # slots written since the last verified sight
    _known: dict[Any, np.ndarray] = field(default_factory=dict)  # name -> u64[S]; 0: not written yet
    _named: Counter[bytes] = field(default_factory=Counter)  # hash -> number of times that a page got it

    def __post_init__(self) -> None:
        self._core, self._executor = self.steps.core, self.steps.executor
        self._pages, self._size = self._core.scheduler.pages, self._executor.page_size
        for segment, *_ in self._executor.pools[:]:  # compiled now, since tests count what is
            for pages in set(self._executor.pools.sizes):
                checksums(jnp.zeros((pages, *segment.shape[1:]), segment.dtype, device=segment.sharding))
        self._patch = pytest.MonkeyPatch()
        self._execute, self._shrink, self._register = (
            self._executor.execute, self._executor.shrink_pools, self._pages.register
        )  # fmt: skip
        self._patch.setattr(self._executor, "execute", self.execute)
        self._patch.setattr(self._executor, "shrink_pools", self.shrink_pools)
        self._patch.setattr(self._pages, "register", self.register)

    def close(self) -> None:
        """Check all pages for the last time."""
        self.check()
        self._patch.undo()

    def check(self) -> None:
        """Check all pages now."""
        self.account()
        self._look(list(self._held()))
        while self._sights:
            self._verify(self._sights.pop(0))

    def account(self) -> None:
        """Check that every page is free, cached or held, with the right number of holders."""
        pages, sequences = self._pages, self._sequences()
        held = Counter(page for sequence in sequences for page in sequence.pages) + Counter(self.aside)
        everything = sorted([*unused_pages(pages), *cached_pages(pages), *held])
        assert everything == list(range(1, pages.num_pages)), f"pages lost, or in two places: {everything}"
        counts = {page: pages.references(page) for page in everything if pages.references(page)}
        assert counts == held
        assert set(cached_pages(pages)) <= set(hashes_of_pages(pages)) == set(pages_of_hashes(pages).values())
        rows = self._core.scheduler.table.rows
        for sequence in sequences:
            if sequence.status is SequenceStatus.RUNNING:
                listed = rows[sequence.slot, : len(sequence.pages)].tolist()
                assert listed == sequence.pages, (
                    f"page table {listed} differs from the sequence's pages {sequence.pages}"
                )

    # -- what changes pages

    def execute(self, work: Work) -> PendingStep:
        self.account()
        self._look(list(self._held()), written=self._slots(work))
        while len(self._sights) > 1:  # the device has not computed the newest one yet
            self._verify(self._sights.pop(0))
        return self._execute(work)

    def shrink_pools(self, moves: Mapping[int, int], pages: int) -> None:
        self._look()
        try:
            self._shrink(moves, pages)
        except BaseException:
            targets = np.array(list(moves.values()), int)
            self._sights[-1].written = np.repeat(targets, self._size), np.tile(np.arange(self._size), len(targets))
            raise
        self._look(moved=dict(moves), pages=pages)

    def register(self, page: int, digest: bytes) -> None:
        self._named[digest] += digest not in pages_of_hashes(self._pages)
        self._register(page, digest)

    # -- looking

    def _look(
        self,
        held: list[tuple[Any, int, int]] | None = None,
        *,
        moved: Mapping[int, int] | None = None,
        pages: int | None = None,
        written: Slots = NOWHERE,
    ) -> None:
        sums = [[checksums(segment) for segment in pool] for pool in self._executor.pools[:]]
        self._sights.append(Sight(sums, moved or {}, pages, held, written))

    def _sequences(self) -> list:
        return [sequence for state in requests_in(self._core).values() for sequence in state.sequences]

    def _held(self) -> Iterable[tuple[Any, int, int]]:
        """Yield what sequences and the prefix cache hold after the present step: name, page and number of tokens."""
        for sequence in self._sequences():
            running = sequence.status is SequenceStatus.RUNNING  # others hold full pages of what a sibling has computed
            tokens = sequence.num_computed if running else len(sequence.pages) * self._size
            for number, page in enumerate(sequence.pages):
                yield (sequence.id, sequence.preemptions, number), page, tokens - number * self._size
        for digest, page in pages_of_hashes(self._pages).items():
            yield (digest, self._named[digest]), page, self._size

    def _slots(self, work: Work) -> Slots:
        """Return the slots that a step writes."""
        pages, tokens = [], []
        computed = [(s, s.num_computed - 1, 1) for s in work.decodes]
        computed += [(chunk.sequence, chunk.start, chunk.length) for chunk in work.chunks]
        for sequence, start, length in computed:
            positions = np.arange(start, start + length)
            pages.append(np.array(sequence.pages)[positions // self._size])
            tokens.append(positions % self._size)
        slots = np.concatenate(pages), np.concatenate(tokens)
        assert len(set(zip(*slots, strict=True))) == len(slots[0]), "two tokens in one slot"
        return slots

    def _verify(self, sight: Sight) -> None:
        now = self._combined(sight.sums)
        if self._sums is not None:
            self._verify_writes(sight, now)
        self._verify_held(sight, now)
        self._sums, self._written = now, sight.written

    def _verify_writes(self, sight: Sight, now: np.ndarray) -> None:
        """Check that only written and moved slots have changed since the previous sight."""
        assert self._sums is not None
        kept = min(len(self._sums), len(now), sight.pages or len(now))
        expected = self._sums.copy()
        expected[list(sight.moved.values())] = self._sums[list(sight.moved)]
        changed = expected[:kept] != now[:kept]
        pages, tokens = (axis[self._written[0] < kept] for axis in self._written)
        changed[pages, tokens] = changed[NULL_PAGE] = False
        assert not changed.any(), f"pages {np.flatnonzero(changed.any(1))} changed without a write or a move"

    def _verify_held(self, sight: Sight, now: np.ndarray) -> None:
        """Check that every holder's tokens are unchanged."""
        if not sight.held:
            return
        names, pages, tokens = zip(*sight.held, strict=True)
        current = now.copy()
        current[sight.written] = 0
        current = current[list(pages)]
        current[np.arange(self._size) >= np.array(tokens)[:, None]] = 0
        none = np.zeros(self._size, np.uint64)
        known = np.array([self._known.get(name, none) for name in names])
        changed = (known != 0) & (known != current)
        wrong = [(names[i], pages[i]) for i in np.flatnonzero(changed.any(1))]
        assert not wrong, f"holders whose tokens changed, with their pages: {wrong}"
        self._known = dict(zip(names, current, strict=True))  # only what is still held

    def _combined(self, sums: list[list[Array]]) -> np.ndarray:
        """Return checksums of all layers and heads together (u64[P, S]), none of which is 0."""
        whole = np.stack([np.concatenate([np.asarray(segment) for segment in pool]) for pool in sums])
        layers, _, heads, _ = whole.shape
        factors = odd_numbers(np.uint64, layers, 1, heads, 1)
        return (whole * factors).sum((0, 2), dtype=np.uint64) | np.uint64(1)
