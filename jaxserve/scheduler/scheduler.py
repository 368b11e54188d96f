"""The scheduler, which decides the tokens to be computed in the next step.

A step decodes one token of every running sequence that is ready, and spends the rest of its token budget on prefill
chunks, which are padded to tiles of `tile` tokens. When pages run out, the newest sequence of the lowest priority gives
all its pages back and is computed again later (preemption by recomputation).
"""

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from jaxserve.core.numeric import ceil_div
from jaxserve.core.request import Sequence, SequenceStatus
from jaxserve.core.step_load import StepLoad
from jaxserve.core.work import Chunk, Work
from jaxserve.kvcache import DividedPool, PagePool, PageTable, page_hashes
from jaxserve.scheduler.routing import tokens_needed
from jaxserve.scheduler.waiting import WaitingQueue

_order = attrgetter("order")


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits on the shape of a step."""

    max_num_seqs: int  # sequences running at once
    max_tiles: int  # prefill tiles in a step
    tile: int  # tokens
    page_size: int  # tokens
    max_decodes: int | None = None  # decodes in one step, if they are fewer than the sequences that run at once


class Scheduler:
    """A scheduler that holds all waiting and running sequences and turns them into `Work`, step by step."""

    def __init__(self, limits: SchedulerLimits, pages: PagePool, table: PageTable):
        self.limits = limits
        self.pages = pages
        self.table = table
        self.max_running = limits.max_num_seqs  # sequences
        self.running: list[Sequence] = []  # by priority, then by arrival
        self._waiting = WaitingQueue()
        self._held: set[Sequence] = set()  # running ones of which KV pages are away (`withhold`)
        self.num_preemptions = 0
        self.prefix_queries = 0  # tokens looked up in the prefix cache
        self.prefix_hits = 0  # tokens found in the prefix cache

    # -- what the engine core calls

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. The siblings of a request with n > 1 wait for the first one."""
        if sequence.parent is not None:
            sequence.parent.children.append(sequence)
        self._enqueue(sequence)

    def schedule(self, step: int, now: float) -> Work:
        """Return the work of the next step, and update the sequences as if the step had been dispatched."""
        decodes = self._schedule_decodes(now)
        chunks: list[Chunk] = []
        tiles = self._continue_prefills(chunks, self.limits.max_tiles)
        self._admit(chunks, tiles)
        return Work(step, tuple(decodes), tuple(chunks))

    def ended(self) -> None:
        """Note that the oldest step in flight has ended, of which the sequences have their tokens."""

    def use_step_times(self, seconds: Callable[[StepLoad], float] | None) -> None:
        """Take what steps are expected to take under the plan in force (s), None if it is unknown."""

    def steady_steps(self) -> int:
        """Return a lower bound on the number of next steps that decode exactly the sequences that run now.

        The result is the limit for `repeat`. It assumes that no request arrives or is aborted, that sequences end by
        their length alone, and that the pool keeps its size. Call it right after a `schedule` without prefill chunks:
        any waiting sequence then waits for pages, which become free only when a running sequence ends.
        """
        first = self._waiting.first
        if not self.running or (first is not None and first.num_inflight):
            return 0
        if isinstance(self.pages, DividedPool) or self.pages.away:
            return 0
        limit = self.pages.available // len(self.running) * self.limits.page_size  # tokens per sequence
        for sequence in self.running:
            if not sequence.decoding or sequence.sampled_late:
                return 0
            limit = min(limit, sequence.limit - sequence.total)
        return limit

    def repeat(self, count: int) -> None:
        """Schedule `count` further steps that decode all running sequences, and count as many earlier steps as ended.

        The result equals `count` calls of `schedule`, before each of which the pages that the step before it has filled
        were registered. `count` is at most `steady_steps`. The sequences have their tokens already.
        """
        size, before = self.limits.page_size, [sequence.num_computed for sequence in self.running]
        filling: dict[int, list[tuple[Sequence, int]]] = {}  # by the number of the step that needs the next page
        for sequence, computed in zip(self.running, before, strict=True):
            for step in range(-computed % size, count, size):
                filling.setdefault(step, []).append((sequence, computed + step))
        # In the order of single steps, since the pages that are found in the prefix cache and dropped depend on it.
        for _, sequences in sorted(filling.items(), key=itemgetter(0)):
            for sequence, computed in sequences:
                sequence.num_computed = computed
                self.register_full_pages(sequence)
            for sequence, computed in sequences:
                self._add_pages(sequence, self._missing_pages(sequence, computed + 1))
        for sequence, computed in zip(self.running, before, strict=True):
            sequence.num_computed = computed + count

    def finish(self, sequence: Sequence) -> None:
        """End a waiting or running sequence and give its pages back."""
        if sequence.status is SequenceStatus.RUNNING:
            self._stop(sequence)
            self._release(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
            self._release(sequence)  # pages shared with a sibling
        sequence.status = SequenceStatus.FINISHED
        orphans, sequence.children = sequence.children, []
        if orphans:  # it ended before its prompt was computed, so the next sibling takes its place
            heir, *others = orphans
            heir.parent, heir.children = None, others
            for other in others:
                other.parent = heir
            if heir.status is SequenceStatus.WAITING:
                self._waiting.remove(heir)
                self._waiting.push(heir)

    def set_salt(self, sequence: Sequence, salt: str) -> None:
        """Set the salt of the pages that a sequence computes from now on, because the plan has changed.

        Its present pages stay in the prefix cache. The pages that it adds to them are not cached until it starts again
        after a preemption, because they depend on pages of the old plan.
        """
        if salt == sequence.salt:
            return
        sequence.salt, sequence.page_hashes = salt, []
        sequence.private = bool(sequence.pages) or sequence.parent is not None

    def limit_sequences(self, count: int | None) -> None:
        """Let at most `count` sequences run at once; None: as many as there are slots. Running sequences go on."""
        self.max_running = self.limits.max_num_seqs if count is None else min(count, self.limits.max_num_seqs)

    def grow(self, count: int) -> None:
        """Add `count` free pages. Raise `ValueError` if the device's pools have no room for them."""
        self.pages.grow(count)

    def shrink(self, count: int, move: Callable[[Mapping[int, int]], None]) -> None:
        """Take `count` pages away. Sequences keep their contents, in other pages if need be.

        `move` gets a mapping from old pages to new pages. It must copy their contents in the device's pools after the
        dispatched steps and before the next one. Raise `PagesInUse` or `ValueError` as `PagePool.shrink`; the sequences
        are then unchanged.
        """
        moves = self.pages.shrink(count, move)
        for sequence in (*self.running, *self._waiting):
            sequence.pages = [moves.get(page, page) for page in sequence.pages]
        self.table.replace_pages(moves)

    def register_full_pages(self, sequence: Sequence) -> None:
        """Put the full pages of a running sequence into the prefix cache, so that other sequences can share them."""
        size, known = self.limits.page_size, len(sequence.page_hashes)
        full = min(sequence.num_computed, len(sequence.tokens)) // size
        if full <= sequence.num_registered:  # most tokens do not fill a page
            return
        if not self.pages.caching or sequence.private or sequence.status is not SequenceStatus.RUNNING:
            return
        if full > known:
            tokens = sequence.tokens[: full * size]
            sequence.page_hashes = page_hashes(tokens, size, sequence.salt, sequence.page_hashes)
        for index in range(sequence.num_registered, full):
            self.pages.register(sequence.pages[index], sequence.page_hashes[index])
        sequence.num_registered = full

    @property
    def idle(self) -> bool:
        """True if no sequence waits or runs."""
        return not self.running and self.num_waiting == 0

    @property
    def num_waiting(self) -> int:
        """Number of waiting sequences."""
        return self._waiting.size

    @property
    def num_deferred(self) -> int:
        """Number of waiting sequences that wait for the prompt of a sibling or a larger instance.

        These wait neither for slots nor for pages.
        """
        return self._waiting.num_deferred

    @property
    def waiting_tokens(self) -> int:
        """Number of prompt tokens of the waiting sequences."""
        return self._waiting.prompt_tokens

    @property
    def waiting_since(self) -> float | None:
        """The time at which the first waiting sequence was queued (its arrival or preemption), None if none waits."""
        return self._waiting.since

    @property
    def longest(self) -> int:
        """Tokens that an instance must be able to hold for all of its sequences, as far as is known; 0 without any.

        Read from any thread.
        """
        sequences = (*tuple(self.running), *tuple(self._waiting))
        return max((max(min(len(s.tokens) + 1, s.max_total), tokens_needed(s.request)) for s in sequences), default=0)

    # -- sequences that change the scheduler

    def detach(self, sequences: Iterable[Sequence], *, keep_pages: bool = True) -> None:
        """Take unfinished sequences out between two steps, with no token in flight. Siblings go together.

        A running one keeps its status, its pages, which stay referenced in the pool, and what has been computed.
        Without `keep_pages` the pages are given back, so that `attach` lets it begin again.
        """
        for sequence in sequences:
            if sequence.status is SequenceStatus.RUNNING:
                self._stop(sequence)
            else:
                self._waiting.remove(sequence)
            if not keep_pages:
                self._release(sequence)

    def attach(self, sequences: Iterable[Sequence], pages: Callable[[int], int] | None, now: float) -> None:
        """Take sequences in that `detach` has taken out of any scheduler.

        `pages` returns the id that a page has in this scheduler's pool, which has the references of the sequences.
        None: the sequences have no page here and begin again. So does a running sequence that finds no free slot; slots
        are given by priority, then by arrival. To begin again does not count as a preemption.
        """
        for sequence in sorted(sequences, key=_order):
            ran = sequence.status is SequenceStatus.RUNNING
            sequence.pages = [] if pages is None else [pages(page) for page in sequence.pages]
            if ran and sequence.pages and self.table.free_slots and not sequence.outgrown:
                self._run(sequence)
                sequence.num_registered = 0  # the prefix cache may be another one
                self.register_full_pages(sequence)
            else:
                if ran:
                    self._begin_again(sequence)
                    sequence.queued_at = now
                self._enqueue(sequence)
        self._waiting.sort_by_age()

    def hold(self, sequences: Iterable[Sequence], now: float) -> None:
        """Stop the sequences of a request that has outgrown the instance, and take back their pages.

        Tokens in flight are ignored, because they will be sampled again. The sequences wait, and are not admitted,
        until they are detached or end.
        """
        for sequence in sequences:
            if sequence.status is SequenceStatus.RUNNING:
                self._stop(sequence)
                sequence.queued_at = now
            else:
                self._waiting.remove(sequence)
            self._begin_again(sequence)
            sequence.num_known_inflight = sequence.num_inflight
            self._waiting.defer(sequence)

    def withhold(self, pages: Collection[int]) -> None:
        """Hold pages whose contents are on their way, and all sequences that have any of them.

        Held sequences keep their slots and pages, and are not scheduled until all of their pages have come (`arrive`).
        Call it with no token in flight.
        """
        self.pages.withhold(pages)
        self._held = {sequence for sequence in self.running if not self.pages.away.isdisjoint(sequence.pages)}

    def arrive(self, pages: Collection[int]) -> None:
        """End the hold on pages, and on the sequences that have all of their pages now."""
        self.pages.arrive(pages)
        self._held = {sequence for sequence in self._held if not self.pages.away.isdisjoint(sequence.pages)}

    def lose(self, now: float) -> None:
        """End the hold on pages whose contents will never come. What held them is computed again."""
        lost, held = set(self.pages.away), list(self._held)
        waiting = [sequence for sequence in self._waiting if not lost.isdisjoint(sequence.pages)]
        for sequence in waiting:
            self._release(sequence)
        for sequence in held:
            self._preempt(sequence, now)
        self.pages.forget(lost)
        self.arrive(lost)

    def forget(self, now: float) -> None:
        """Let all sequences wait without pages, and empty the prefix cache: no contents are sure any more."""
        sequences = [*self.running, *self._waiting]
        self.detach(sequences, keep_pages=False)
        self.attach(sequences, None, now)
        self.pages.clear_cache()

    def is_held(self, sequence: Sequence) -> bool:
        """Return whether pages of a sequence are on their way."""
        if sequence.status is SequenceStatus.RUNNING:
            return sequence in self._held
        return bool(self.pages.away) and not self.pages.away.isdisjoint(sequence.pages)

    @property
    def num_held(self) -> int:
        """Number of running sequences that wait for KV pages on their way."""
        return len(self._held)

    # -- decode

    def _schedule_decodes(self, now: float) -> list[Sequence]:
        decodes, size = [], self.limits.page_size
        for sequence in tuple(self.running):  # a copy: preemption removes later sequences
            computed, total = sequence.num_computed, sequence.total
            if sequence.status is not SequenceStatus.RUNNING or sequence in self._held:
                continue  # preempted a moment ago, or without some of its KV
            if computed != total - 1 or not sequence.num_prompt < total < sequence.limit:
                # Still in prefill, or its last token is in flight. A grammar may have forced several tokens at once.
                if sequence.matcher is not None:
                    self._make_room(sequence, len(sequence.tokens), now)
                continue
            if computed >= len(sequence.pages) * size and not self._make_room(sequence, computed + 1, now):
                continue
            sequence.num_computed += 1
            sequence.num_inflight += 1
            decodes.append(sequence)
        return decodes

    def _make_room(self, sequence: Sequence, tokens: int, now: float) -> bool:
        """Give a sequence pages for `tokens` tokens. Return False if it had to be preempted itself."""
        missing = self._missing_pages(sequence, tokens)
        pages = self.pages
        while missing > pages.available_beside(sequence.pages):
            victim = next(v for v in reversed(self.running) if pages.may_take_from(sequence.pages, v.pages))
            self._preempt(victim, now)
            if victim is sequence:
                return False
        self._add_pages(sequence, missing)
        return True

    def _missing_pages(self, sequence: Sequence, tokens: int) -> int:
        return ceil_div(tokens, self.limits.page_size) - len(sequence.pages)

    def _add_pages(self, sequence: Sequence, count: int) -> None:
        if count > 0:
            new = self.pages.allocate(count, sequence.pages)
            self.table.append(sequence.slot, len(sequence.pages), new)
            sequence.pages += new

    def _preempt(self, sequence: Sequence, now: float) -> None:
        self._stop(sequence)
        self._begin_again(sequence)
        sequence.preemptions += 1
        sequence.queued_at = now
        self.num_preemptions += 1
        self._waiting.push(sequence)

    # -- prefill

    def _continue_prefills(self, chunks: list[Chunk], tiles: int) -> int:
        for sequence in self.running:
            if tiles == 0:
                break
            if sequence.num_computed < len(sequence.tokens) and not sequence.decoding and sequence not in self._held:
                tiles -= self._add_chunk(chunks, sequence, tiles)
        return tiles

    def _admit(self, chunks: list[Chunk], tiles: int) -> None:
        while tiles > 0 and (sequence := self._admit_next()) is not None:
            tiles -= self._add_chunk(chunks, sequence, tiles)

    def _admit_next(self) -> Sequence | None:
        """Let the first waiting sequence run and return it, if there is a slot for it and pages for all its tokens."""
        sequence = self._waiting.first
        if sequence is None or sequence.num_inflight or len(self.running) >= self.max_running:
            return None  # a preempted one whose last token is still in flight comes first
        if not self._take_pages(sequence) and not self._take_back_shared_pages(sequence):
            return None
        self._waiting.remove(sequence)
        self._run(sequence)
        return sequence

    def _take_pages(self, sequence: Sequence) -> bool:
        """Take pages, cached ones first, for all tokens of a waiting sequence. Return whether enough were free."""
        size = self.limits.page_size
        shared: list[int] = []
        if self.is_held(sequence):
            return False
        if not sequence.pages:
            shared = self._cached_prefix(sequence)
            self.pages.retain(shared)
        held = len(sequence.pages) + len(shared)
        missing = ceil_div(len(sequence.tokens), size) - held
        headroom = len(self.running)  # every running sequence may need a page soon
        if missing + headroom > self.pages.available_beside(sequence.pages or shared):
            self.pages.release(shared)
            return False
        sequence.pages += shared + self.pages.allocate(max(missing, 0), sequence.pages or shared)
        sequence.num_computed = held * size
        sequence.num_registered = held
        if sequence.starts == 0:
            self.prefix_queries += sequence.num_prompt
            self.prefix_hits += held * size
            sequence.num_cached = held * size
        return True

    def _take_back_shared_pages(self, sequence: Sequence) -> bool:
        """Let waiting siblings release the pages of their shared prompt if no running sequence can free any.

        Return whether `sequence` has its pages now.
        """
        if self.running:
            return False
        for sibling in self._waiting:
            if sibling is not sequence:
                self._release(sibling)
        return self._take_pages(sequence)

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        if not self.pages.caching or sequence.params.prompt_logprobs is not None:
            return []
        size, tokens = self.limits.page_size, sequence.tokens
        sequence.page_hashes = page_hashes(tokens, size, sequence.salt, sequence.page_hashes)
        usable = (len(tokens) - 1) // size  # the newest token is always computed, for its logits
        return self.pages.lookup(sequence.page_hashes[:usable])

    def _add_chunk(self, chunks: list[Chunk], sequence: Sequence, tiles: int) -> int:
        """Add a chunk with as much of a sequence's prefill as fits into `tiles`. Return the number of tiles used."""
        start, left = sequence.num_computed, len(sequence.tokens) - sequence.num_computed
        length = min(left, tiles * self.limits.tile)
        last = length == left
        chunks.append(Chunk(sequence, start, length, last))
        sequence.num_computed += length
        if last:
            sequence.num_inflight += sequence.request.generates
            self._release_children(sequence)
        self.register_full_pages(sequence)
        return ceil_div(length, self.limits.tile)

    def _release_children(self, sequence: Sequence) -> None:
        """Queue the siblings of a sequence whose prompt this step completes, sharing its full pages."""
        full = (sequence.num_prompt - 1) // self.limits.page_size
        children, sequence.children = sequence.children, []
        for child in children:
            child.parent = None
            if child.status is not SequenceStatus.WAITING:
                continue
            child.pages = sequence.pages[:full]
            self.pages.retain(child.pages)
            self._waiting.remove(child)
            self._waiting.push(child)

    # -- bookkeeping

    def _enqueue(self, sequence: Sequence) -> None:
        """Let a sequence wait: for its turn, or for the prompt of a sibling."""
        if sequence.parent is None:
            self._waiting.push(sequence)
        else:
            self._waiting.defer(sequence)

    def _run(self, sequence: Sequence) -> None:
        """Give a sequence a slot for its pages, and let it run from the next step on."""
        sequence.slot = self.table.take_slot(sequence.pages)
        sequence.status = SequenceStatus.RUNNING
        sequence.starts += 1
        insort(self.running, sequence, key=_order)

    def _stop(self, sequence: Sequence) -> None:
        """Take the slot of a running sequence back."""
        self.running.remove(sequence)
        self._held.discard(sequence)
        self.table.give_slot(sequence.slot)
        sequence.slot = -1

    def _begin_again(self, sequence: Sequence) -> None:
        """Let a sequence wait without pages, so that all of its tokens are computed once more."""
        self._release(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed = 0
        sequence.private = False

    def _release(self, sequence: Sequence) -> None:
        self.pages.release(sequence.pages)
        sequence.pages, sequence.num_registered = [], 0
