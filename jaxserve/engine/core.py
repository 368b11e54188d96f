"""The engine core, which turns requests into the work of steps, and the sampled tokens into outputs.

It has no device, no clock and no thread. Time is an argument.
"""

import logging
from collections import abc
from dataclasses import dataclass, field

import numpy as np

from jaxserve.control.costs import InstanceCost
from jaxserve.core.errors import EngineFailed, JaxserveError, NonFiniteOutput, QueueFull, RequestError
from jaxserve.core.request import FinishReason, Request, RequestOutput, Sequence, SequenceStatus
from jaxserve.core.step_load import Loads
from jaxserve.core.structured import Matcher
from jaxserve.core.work import Chunk, StepOutput, Work
from jaxserve.engine.admission import check_request, check_room, make_sequences
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.counters import EngineCounters, observe_end
from jaxserve.engine.logprobs import take_logprobs, take_prompt_logprobs
from jaxserve.engine.matchers import accepts, no_token
from jaxserve.engine.outputs import RequestState
from jaxserve.engine.step_times import StepTimes
from jaxserve.engine.text import check_end, flush_text
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.scheduler import Scheduler
from jaxserve.telemetry import EngineMetrics, Snapshot
from jaxserve.telemetry.tracing import EndedRequest

log = logging.getLogger(__name__)

MAX_FAILURES = 2  # of steps that a request survives, which may itself be the reason


@dataclass
class _StepResult:
    """A step's result while `EngineCore.update` processes it."""

    output: StepOutput
    tokens: list[int]
    now: float
    generated: int = 0
    gaps: dict[float, int] = field(default_factory=dict)  # seconds between two tokens of a sequence -> count
    changed: dict[str, list[Sequence]] = field(default_factory=dict)  # by request id
    failed: list[RequestOutput] = field(default_factory=list)


class EngineCore:
    """The core of one instance, which follows its requests from admission to the last token."""

    def __init__(
        self,
        scheduler: Scheduler,
        info: ModelInfo,
        tokenizer: Tokenizer | None,
        metrics: EngineMetrics,
        *,
        eos_token_ids: abc.Sequence[int] = (),
        salt: str = "",
        seed: int = 0,
        plan_fields: Snapshot,
        index: int = 0,
        name: str | None = None,
        loads: Loads | None = None,
        cost: InstanceCost | None = None,
        capacity: int | None = None,
        stages: int = 1,
        trace: abc.Callable[[EndedRequest], None] | None = None,
    ):
        """`index`, `name`: of the instance (default: its index). `salt`: the plan's name in the prefix cache.

        `plan_fields`: the fields of the snapshot that follow from the plan. `cost`: the step times under the plan, of
        loads computed by `loads`; None if they are unknown. `capacity`: the tokens, prompt included, that the instance
        promises to hold of a sequence, by default those of the service. `stages`: of the instance. `trace` is called
        with each request that has ended.
        """
        self.scheduler = scheduler
        self.info = info
        self.tokenizer = tokenizer
        self.name = str(index) if name is None else name
        self.metrics = metrics.instance(self.name)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.salt = salt
        self.index = index
        self.capacity = info.max_model_len if capacity is None else capacity
        self.trace = trace
        self._counters = EngineCounters(scheduler, self.metrics, plan_fields, StepTimes(loads, cost, stages=stages))
        scheduler.use_step_times(None if cost is None else cost.seconds)
        self.metrics.follow(self.report)
        self._caching = scheduler.pages.caching
        self._seeds = np.random.default_rng(seed)
        self._requests: dict[str, RequestState] = {}
        self._outgrown: list[RequestState] = []  # unfinished, or ended since then

    # -- requests

    def add(self, request: Request, info: ModelInfo | None = None, *, accepted: bool = False) -> None:
        """Accept a request. Raise `RequestError` or `QueueFull`, without any change, if it is refused.

        `info`: the limits as they are now (default: as they were at the start). `accepted`: the engine has accepted the
        request before, so that it needs no room in the queue.
        """
        info = info or self.info
        try:
            check_request(request, info, self.tokenizer)
            self._check_id(request.id)
            if not accepted:
                check_room(request, self.scheduler.num_waiting, self.scheduler.waiting_tokens, info)
        except QueueFull:
            self.metrics.rejected("queue_full")
            raise
        except RequestError:
            self.metrics.rejected("invalid")
            raise
        seed = request.params.seed
        sequences = make_sequences(
            request,
            info,
            self.tokenizer,
            eos_token_ids=self.eos_token_ids,
            seed=int(self._seeds.integers(2**63)) if seed is None else seed,
            salt=self._salt_of(request),
        )
        state = self._requests[request.id] = RequestState(request, sequences)
        for sequence in sequences:
            sequence.limit = min(sequence.max_total, self.capacity)
            self.scheduler.add(sequence)
        if sequences[0].outgrown:
            self._hold(state, request.arrival)

    def _check_id(self, request_id: str) -> None:
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is already in flight", field="request_id", value=request_id)

    def _salt_of(self, request: Request) -> str:
        return f"{self.salt}|{request.salt}"

    def has_room(self, request: Request) -> bool:
        """Return whether the queue has room. An empty queue has room for every request: `add` refuses one too large."""
        waiting, params = self.scheduler.num_waiting, request.params
        tokens = len(request.prompt_token_ids) * params.n
        return waiting == 0 or (
            waiting + params.n <= self.info.max_queued_requests
            and self.scheduler.waiting_tokens + tokens <= self.info.max_queued_tokens
        )

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT, now: float = 0.0) -> None:
        """End a request and free its pages. Unknown ids are ignored."""
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._end_early(state, reason, now)
            self._take_snapshot(now)  # the next step, which would take it, may never come

    def _end_early(self, state: RequestState, reason: FinishReason, now: float) -> None:
        for sequence in state.sequences:
            if sequence.status is not SequenceStatus.FINISHED:
                sequence.finish_reason = reason
                sequence.children.clear()  # siblings end with it
                self.scheduler.finish(sequence)
        self._end(state, reason, now)

    def replan(self, salt: str, plan_fields: Snapshot, cost: InstanceCost | None = None) -> None:
        """Set what follows from the plan, after a change between two steps.

        That is its name in the prefix cache, its fields of the snapshot, and its step times (None if they are unknown).

        Requests in flight continue. If the name differs, the pages that they compute from now on are not shared.
        """
        self.salt, self._counters.plan_fields, self._counters.times.cost = salt, plan_fields, cost
        self.scheduler.use_step_times(None if cost is None else cost.seconds)
        for state in self._requests.values():
            for sequence in state.sequences:
                if sequence.status is not SequenceStatus.FINISHED:
                    self.scheduler.set_salt(sequence, self._salt_of(state.request))
        self._take_snapshot(self.snapshot.time)

    # -- requests that change the instance

    @property
    def request_ids(self) -> abc.Collection[str]:
        """The ids of the unfinished requests."""
        return self._requests.keys()

    @property
    def unfinished(self) -> dict[str, list[Sequence]]:
        """The unfinished sequences of each unfinished request."""
        return {request_id: state.unfinished_sequences for request_id, state in self._requests.items()}

    def detach(self, request_ids: abc.Iterable[str] | None = None, *, keep_pages: bool = True) -> list[RequestState]:
        """Take requests out, by default all, with everything that the host knows of them, and return them.

        Call it between two steps with no token in flight (`StepLoop.drain`). The KV pages stay referenced in this
        core's pool, for a pool that is made of it; without `keep_pages` they are given back.
        """
        ids = list(self._requests) if request_ids is None else list(request_ids)
        states = [self._requests[request_id] for request_id in ids]
        in_flight = [s.id for state in states for s in state.unfinished_sequences if s.num_inflight]
        assert not in_flight, f"sequences with a token in flight: {in_flight}"
        for request_id in ids:
            del self._requests[request_id]
        self._outgrown = [state for state in self._outgrown if state not in states]
        for state in states:
            self.scheduler.detach(state.unfinished_sequences, keep_pages=keep_pages)
        self._take_snapshot(self.snapshot.time)
        return states

    def attach(self, states: abc.Iterable[RequestState], pages: abc.Callable[[int], int] | None, now: float) -> None:
        """Take in requests that another core, or this one, has detached. They go on where they were.

        `pages` returns the id in this core's pool, which has the references already, of each page that a request had.
        None: all KV is computed again, as after a preemption, but not counted as one. Requests that are too long for
        this instance are outgrown at once. The limits of the queue do not apply. Raise `ValueError`, without any
        change, if a request's id is in use.
        """
        states = list(states)
        for state in states:
            if state.request.id in self._requests:
                raise ValueError(f"request id {state.request.id!r} is already in flight")
        sequences = [sequence for state in states for sequence in state.unfinished_sequences]
        for sequence in sequences:
            sequence.limit = min(sequence.max_total, self.capacity)
        self.scheduler.attach(sequences, pages, now)
        for state in states:
            self._requests[state.request.id] = state
            for sequence in state.unfinished_sequences:
                self.scheduler.set_salt(sequence, self._salt_of(state.request))
            if any(sequence.outgrown for sequence in state.unfinished_sequences):
                self._hold(state, now)
        self._take_snapshot(now)

    def withhold(self, pages: abc.Collection[int]) -> None:
        """Hold KV pages that are on their way, as `Scheduler.withhold`."""
        self.scheduler.withhold(pages)
        self._take_snapshot(self.snapshot.time)

    def arrive(self, pages: abc.Collection[int]) -> None:
        """End the hold on KV pages that have come, as `Scheduler.arrive`."""
        self.scheduler.arrive(pages)
        self._take_snapshot(self.snapshot.time)

    def lose(self, now: float) -> None:
        """Let all that had KV pages on their way be computed again, as `Scheduler.lose`."""
        self.scheduler.lose(now)
        self._take_snapshot(now)

    def take_outgrown(self) -> list[RequestState]:
        """Take out and return the requests that need more tokens than this instance holds, without their KV.

        Call it after each step. A request whose other answers have tokens in flight comes after the next step.
        """
        if not self._outgrown:
            return []
        self._outgrown = [state for state in self._outgrown if self._requests.get(state.request.id) is state]
        return self.detach(
            state.request.id for state in self._outgrown if not any(s.num_inflight for s in state.sequences)
        )

    def abandon(self, now: float) -> list[RequestOutput]:
        """Take note that the steps in flight have failed, and no step follows. Return the outputs of failed requests.

        These have lost a part of their answers, or steps have failed too often while they ran. All others go on
        wherever they are attached.
        """
        failed: list[RequestOutput] = []
        for state in list(self._requests.values()):
            for sequence in state.sequences:
                sequence.num_inflight = sequence.num_known_inflight = 0
            unfinished = state.unfinished_sequences
            state.failures += any(sequence.status is SequenceStatus.RUNNING for sequence in unfinished)
            if state.failures > MAX_FAILURES or state.unfinished != len(unfinished):
                del self._requests[state.request.id]
                self._end_early(state, FinishReason.ERROR, now)
                failed.append(state.failed(EngineFailed(f"steps have failed that computed request {state.request.id}")))
        self.scheduler.forget(now)
        self._take_snapshot(now)
        return failed

    def reset_prefix_cache(self) -> None:
        """Forget all cached prompts. Call between two steps."""
        self.scheduler.pages.clear_cache()

    def close(self) -> None:
        """Let the snapshot show the totals of an instance that has ended, and nothing else."""
        self._counters.close()

    def _hold(self, state: RequestState, now: float) -> None:
        """Stop all sequences of a request that has outgrown the instance."""
        self.scheduler.hold(state.unfinished_sequences, now)
        self._outgrown.append(state)

    @property
    def idle(self) -> bool:
        """True if no request is in flight."""
        return self.scheduler.idle

    @property
    def load(self) -> int:
        """The number of waiting prompt tokens plus running sequences, by which routers compare instances."""
        return self.scheduler.waiting_tokens + len(self.scheduler.running)

    @property
    def plan_fields(self) -> Snapshot:
        """The fields of the snapshot that follow from the plan in force."""
        return self._counters.plan_fields

    @property
    def cost(self) -> InstanceCost | None:
        """The step times under the plan in force; None if they are unknown."""
        return self._counters.times.cost

    @property
    def snapshot(self) -> Snapshot:
        """The state after the latest step, abort or change of the plan. Read from any thread."""
        return self._counters.snapshot

    def report(self) -> Snapshot:
        """Return `snapshot`, as a function that the metrics call when they are scraped."""
        return self.snapshot

    # -- steps

    def schedule(self, now: float) -> Work:
        """Return the next step's work, which is empty if there is nothing to do."""
        work = self.scheduler.schedule(self._counters.steps, now)
        for chunk in work.chunks:
            if chunk.sequence.first_scheduled is None:
                chunk.sequence.first_scheduled = now
        if work:
            self._counters.steps += 1
            self._counters.times.begun(work, now)
        return work

    def update(self, work: Work, output: StepOutput, now: float) -> list[RequestOutput]:
        """Process the result of a step, and return the new outputs of its requests."""
        step = _StepResult(output, output.tokens.tolist(), now)
        for row, sequence in enumerate(work.decodes):
            self._take_token(step, sequence, row)
        for index, chunk in enumerate(work.chunks):
            if output.prompt_logprobs and index in output.prompt_logprobs:
                self._take_prompt_logprobs(step, chunk, output.prompt_logprobs[index])
            if not chunk.last:
                continue
            if chunk.sequence.request.generates:
                self._take_token(step, chunk.sequence, len(work.decodes) + index)
            else:
                self._end_prompt(step, chunk.sequence, index)
        self.scheduler.ended()
        self._counters.step(step.generated, work.num_tokens - len(work.decodes), step.gaps)
        self._counters.times.ended(now)
        self._take_snapshot(now)
        changed = [self._output(request_id, sequences, now) for request_id, sequences in step.changed.items()]
        return changed + step.failed

    def repeat(self, count: int, end: float) -> None:
        """Update and schedule `count` steps that decode all running sequences, for simulations.

        The last of these steps ends at time `end`. The result equals `count` calls of `update`, each followed by
        `schedule`. `count` is at most `scheduler.steady_steps`, and no token may end a sequence. All tokens are 0, and
        the outputs come with the next `update`.
        """
        running, tokens, seconds = self.scheduler.running, [0] * count, 0.0
        for sequence in running:
            assert sequence.last_token is not None
            seconds += end - sequence.last_token
            sequence.tokens += tokens
            sequence.last_token = end
        self.scheduler.repeat(count - 1)
        for sequence in running:
            self.scheduler.register_full_pages(sequence)
        self._counters.steady(count, len(running), seconds)
        self._counters.times.repeated(count, end)
        self._take_snapshot(end)  # as `update` does, before the next step begins
        self.scheduler.repeat(1)
        self._counters.steps += 1

    # -- tokens

    def _take_token(self, step: _StepResult, sequence: Sequence, row: int) -> None:
        sequence.num_inflight -= 1
        if sequence.status is SequenceStatus.FINISHED:
            return  # it ended while this token was in flight
        if sequence.num_known_inflight:
            sequence.num_known_inflight -= 1
            return
        request, token, now = sequence.request, step.tokens[row], step.now
        if token < 0:
            self._fail(step, request, no_token(sequence))
            return
        if sequence.matcher is not None and not accepts(sequence.matcher, token):
            self._fail(step, request, no_token(sequence))
            return
        sequence.tokens.append(token)
        if sequence.first_token is None:
            sequence.first_token = now
            self._counters.first_token(now - request.arrival)
            if sequence.index == 0:
                self._counters.prompt_done(sequence)
        elif sequence.last_token is not None:
            gap = now - sequence.last_token  # equal for nearly all sequences of a step
            step.gaps[gap] = step.gaps.get(gap, 0) + 1
        sequence.last_token = now
        if request.params.logprobs is not None:
            take_logprobs(self.tokenizer, sequence, token, step.output, row)
        if sequence.length_alone:
            if len(sequence.tokens) >= sequence.limit:
                sequence.finish_reason = FinishReason.LENGTH
        else:
            check_end(sequence, token)
            if sequence.matcher is not None and sequence.finish_reason is None:
                step.generated += self._take_forced_tokens(sequence, sequence.matcher)
        if sequence.finish_reason is not None:
            self._finish(sequence, now)
        elif self._caching:
            self.scheduler.register_full_pages(sequence)
        step.generated += 1
        if request.stream or sequence.finish_reason is not None:
            step.changed.setdefault(request.id, []).append(sequence)

    def _finish(self, sequence: Sequence, now: float) -> None:
        """End a sequence, or let its request leave if only this instance's capacity ends it."""
        if sequence.finish_reason is FinishReason.LENGTH and sequence.outgrown:
            sequence.finish_reason = None
            self._hold(self._requests[sequence.request.id], now)
        else:
            flush_text(sequence)
            self.scheduler.finish(sequence)

    def _take_forced_tokens(self, sequence: Sequence, matcher: Matcher) -> int:
        """Append the tokens that the grammar forces, which are computed together, and return their number.

        A step in flight samples the first of them, so that its token is known. Several are a chunk in the next step,
        which saves this sequence steps, and makes that step longer for all: they must be more than there are sequences.
        Tokens that penalties count, bad words may forbid, or log-probabilities are asked for are sampled one by one.
        """
        params = sequence.params
        one_by_one = params.logprobs is not None or params.penalized or sequence.bad_words
        if one_by_one or sequence.num_generated < params.min_tokens:
            return 0
        forced, count = matcher.forced(), 0
        for token in forced if len(forced) > len(self.scheduler.running) + 1 else forced[: sequence.num_inflight]:
            matcher.accept(token)
            sequence.tokens.append(token)
            count += 1
            check_end(sequence, token)
            if sequence.finish_reason is not None:
                break
        if count:
            sequence.num_known_inflight = sequence.num_inflight
        return count

    def _fail(self, step: _StepResult, request: Request, error: JaxserveError) -> None:
        """End a request that cannot go on, such as one for which the model computed values that are not finite."""
        state = self._requests.pop(request.id)
        log.error("request %s: %s", request.id, error)
        if isinstance(error, NonFiniteOutput):
            self.metrics.not_finite()
        self._end_early(state, FinishReason.ERROR, step.now)
        step.changed.pop(request.id, None)
        step.failed.append(state.failed(error))

    def _take_prompt_logprobs(self, step: _StepResult, chunk: Chunk, arrays: tuple[np.ndarray, ...]) -> None:
        sequence = chunk.sequence
        if sequence.status is SequenceStatus.FINISHED:
            return
        if np.isnan(arrays[0]).any() or np.isnan(arrays[3]).any():
            self._fail(step, sequence.request, NonFiniteOutput("log-probabilities"))
            return
        take_prompt_logprobs(self.tokenizer, chunk, arrays)

    def _end_prompt(self, step: _StepResult, sequence: Sequence, chunk: int) -> None:
        """End a sequence of a request that wants no more than its prompt to be computed."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.request.embed:
            assert step.output.embeddings is not None
            embedding = step.output.embeddings[chunk]
            if not np.isfinite(embedding).all():
                self._fail(step, sequence.request, NonFiniteOutput("embeddings"))
                return
            sequence.embedding = embedding
        if sequence.index == 0:
            self._counters.prompt_done(sequence)
        sequence.finish_reason = FinishReason.STOP if sequence.request.embed else FinishReason.LENGTH
        self.scheduler.finish(sequence)
        step.changed.setdefault(sequence.request.id, []).append(sequence)

    # -- outputs and telemetry

    def _output(self, request_id: str, sequences: list[Sequence], now: float) -> RequestOutput:
        state = self._requests[request_id]
        state.unfinished -= sum(s.status is SequenceStatus.FINISHED for s in sequences)
        if state.unfinished == 0:
            del self._requests[request_id]
            self._end(state, state.sequences[0].finish_reason or FinishReason.STOP, now)
        return state.take(sequences)

    def _end(self, state: RequestState, reason: FinishReason, now: float) -> None:
        self._counters.ended(state)
        self.report_end(state, reason, now)

    def report_end(self, state: RequestState, reason: FinishReason, now: float) -> None:
        """Put the end of a request into the metrics and the trace, also of one that is in no core.

        Such a request may have no sequences yet. Call from any thread.
        """
        state.finished_at = now
        observe_end(self.metrics, state, reason, now)
        if self.trace is not None:
            self.trace(state.ended(reason, now))

    def _take_snapshot(self, now: float) -> None:
        self._counters.take(now)
