"""PipelinedScheduler: the work of an instance with several stages, in microbatches that its stages compute in turn.

All work, in flight and ready, is divided among as many microbatches as there are stages, so that a sequence gets its
next token when every stage has computed one microbatch of each. A step more may be in flight, with what has come since.

A sequence has at most one token in flight. It is scheduled again when the host knows this token, so that no step waits
for another one's sampler. Chunks of one prompt may be in flight together, because each stage computes them in order.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from jaxserve.core.numeric import ceil_div
from jaxserve.core.request import Sequence, SequenceStatus
from jaxserve.core.step_load import StepLoad
from jaxserve.core.work import Chunk, Work
from jaxserve.kvcache import PagePool, PageTable
from jaxserve.scheduler.chunk_cost import TOKENS, ChunkCost
from jaxserve.scheduler.lookahead import MicrobatchLimits, Portion, first_piece, lookahead
from jaxserve.scheduler.scheduler import Scheduler, SchedulerLimits

# Of a microbatch: the least work that makes one more than there are stages. Less joins the next one whose tokens come,
# as otherwise a few sequences that have begun apart would make every stage read its weights once more for each token.
LEAST_MORE = 0.5


class PipelinedScheduler(Scheduler):
    """A scheduler that divides all work, in flight and ready, equally among the stages of a pipeline."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pages: PagePool,
        table: PageTable,
        *,
        microbatches: int,
        cost: ChunkCost,
        measured: bool = True,
        by_tokens: bool = False,
    ):
        """`microbatches`: their number, that of the stages. `cost` holds until step times are known if `measured`.

        With `by_tokens`, microbatches have equally many tokens instead of equal cost.
        """
        super().__init__(limits, pages, table)
        self.microbatches = microbatches
        self.cost = self._default_cost = replace(cost, tile=limits.tile)
        self._measured, self._by_tokens = measured, by_tokens
        self._in_flight: deque[float] = deque()  # the costs of the steps in flight

    def schedule(self, step: int, now: float) -> Work:
        self._make_room_for_forced_tokens(now)
        batch = self._next_microbatch()
        decodes = self._decode(batch, now)
        work = Work(step, tuple(decodes), tuple(self._prefill(batch)))
        if work:
            done = [(s.num_computed - 1, 1) for s in decodes] + [(c.start, c.length) for c in work.chunks]
            self._in_flight.append(sum(self._measure.added(prefix, length) for prefix, length in done))
        return work

    def ended(self) -> None:
        self._in_flight.popleft()

    def use_step_times(self, seconds: Callable[[StepLoad], float] | None) -> None:
        if not self._measured:
            return
        self.cost = self._default_cost
        if seconds is not None:
            found = ChunkCost.of_steps(seconds, self.limits.max_tiles * self.limits.tile)
            self.cost = replace(found, tile=self.limits.tile) if found.b > 0 else self._default_cost

    def steady_steps(self) -> int:
        return 0

    # -- forming microbatches

    @property
    def _measure(self) -> ChunkCost:
        """The cost that microbatches shall have equally much of."""
        return TOKENS if self._by_tokens else self.cost

    def _next_microbatch(self) -> list[Portion]:
        """Return the first microbatch of the work that is ready."""
        queue, cost = self._ready(), self._measure
        if not queue:
            return []
        ready = sum(cost.added(portion.prefix, portion.length) for portion in queue)
        share, limits = (ready + sum(self._in_flight)) / self.microbatches, self._microbatch_limits()
        if len(self._in_flight) >= self.microbatches and ready < LEAST_MORE * share:
            return []
        batch = lookahead(queue, cost, limits, ready / share)[0]
        prompt = next((portion for portion in queue if not portion.decode), None)
        if prompt is not None and all(portion.decode for portion in batch):
            # Its share of a short prompt is less than the least piece. Nobody gains if it waits for another microbatch.
            batch = [*batch, first_piece(prompt, limits)]
        return batch

    def _microbatch_limits(self) -> MicrobatchLimits:
        limits, cost = self.limits, self.cost
        # A smaller piece of a prompt would spend more than half of its time on what each step costs.
        least = max(1, int(min(cost.g / cost.b, limits.max_tiles * limits.tile / 2)))
        return MicrobatchLimits(limits.max_decodes or limits.max_num_seqs, limits.max_tiles, limits.tile, least)

    def _ready(self) -> list[Portion]:
        """Return the work that a step may do now: decodes, prompts of running sequences, then waiting sequences."""
        decodes, prompts = [], []
        for sequence in self.running:
            computed, known = sequence.num_computed, len(sequence.tokens)
            if sequence.num_inflight or computed >= known or self.is_held(sequence):
                continue
            if not sequence.decoding:
                prompts.append(Portion(sequence, computed, known - computed))
            elif known < sequence.limit:
                decodes.append(Portion(sequence, computed, 1, decode=True))
        window = self.microbatches * self.limits.max_tiles * self.limits.tile  # tokens
        return [*decodes, *prompts, *self._next_waiting(window - sum(portion.length for portion in prompts))]

    def _next_waiting(self, tokens: int) -> Iterable[Portion]:
        """Yield waiting sequences with `tokens` tokens together, as far as there are slots and pages for them."""
        size, available = self.limits.page_size, self.pages.available
        slots = self.max_running - len(self.running)
        if tokens <= 0 or slots <= 0 or self._waiting.first is None:
            return
        for count, sequence in enumerate(self._waiting.next(slots), len(self.running)):
            if sequence.num_inflight or tokens <= 0 or self.is_held(sequence):
                return
            shared = [] if sequence.pages else self._cached_prefix(sequence)
            held = len(sequence.pages) + len(shared)
            available -= ceil_div(len(sequence.tokens), size) - held
            available -= sum(self.pages.references(page) == 0 for page in shared)
            if count and available < count:
                return  # every running sequence may need a page soon
            length = len(sequence.tokens) - held * size
            yield Portion(sequence, held * size, length)
            tokens -= length

    # -- the work of one microbatch

    def _make_room_for_forced_tokens(self, now: float) -> None:
        """Give pages to sequences whose grammar has forced several tokens at once, which are computed as a chunk."""
        for sequence in tuple(self.running):
            ready = sequence.status is SequenceStatus.RUNNING and not sequence.num_inflight
            if sequence.matcher is not None and ready and not self.is_held(sequence):
                self._make_room(sequence, len(sequence.tokens), now)

    def _decode(self, batch: list[Portion], now: float) -> list[Sequence]:
        decodes, size = [], self.limits.page_size
        for portion in batch:
            sequence, computed = portion.sequence, portion.prefix
            if not portion.decode or sequence.status is not SequenceStatus.RUNNING:
                continue  # or preempted a moment ago
            if computed >= len(sequence.pages) * size and not self._make_room(sequence, computed + 1, now):
                continue
            sequence.num_computed += 1
            sequence.num_inflight += 1
            decodes.append(sequence)
        return decodes

    def _prefill(self, batch: list[Portion]) -> list[Chunk]:
        chunks: list[Chunk] = []
        for portion in batch:
            sequence = portion.sequence
            if portion.decode:
                continue
            if sequence.status is SequenceStatus.WAITING and (
                sequence is not self._waiting.first or self._admit_next() is None
            ):
                break  # those after it wait their turn
            if sequence.num_computed < len(sequence.tokens):
                self._add_chunk(chunks, sequence, ceil_div(portion.length, self.limits.tile))
        return chunks
