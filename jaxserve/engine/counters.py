"""The counters of one instance, from which its metrics and snapshots are made."""

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from jaxserve.core.request import FinishReason, Sequence
from jaxserve.engine.outputs import RequestState
from jaxserve.engine.step_times import StepTimes
from jaxserve.scheduler import Scheduler
from jaxserve.telemetry import TIME_BOUNDS, InstanceMetrics, Snapshot


class EngineCounters:
    """Counters that the engine core updates between two steps. `snapshot` may be read from any thread."""

    def __init__(self, scheduler: Scheduler, metrics: InstanceMetrics, plan_fields: Snapshot, times: StepTimes):
        """`plan_fields`: the fields of the snapshot that follow from the plan."""
        self.plan_fields = plan_fields
        self.times = times
        self.steps = 0  # scheduled steps
        self._scheduler = scheduler
        self._metrics = metrics
        self._latest: tuple[Snapshot, dict[str, Any]] = (plan_fields, {})  # the two parts of `snapshot`
        self._reported = (0, 0, 0)  # preemptions, prefix queries and prefix hits that the metrics already have
        self._first_tokens = (0,) * (len(TIME_BOUNDS) + 1)  # histogram of seconds from arrival to first token
        self._gaps, self._gap_seconds = 0, 0.0  # number and sum of the times between two tokens of a sequence
        self._generated = self._prefilled = self._finished = 0

    @property
    def snapshot(self) -> Snapshot:
        """The state at the latest `take`."""
        plan_fields, latest = self._latest
        return plan_fields.with_values(**latest)

    def take(self, now: float) -> None:
        """Take the state at time `now` for `snapshot`."""
        scheduler, since = self._scheduler, self._scheduler.waiting_since
        gauges = {
            "time": now,
            "num_running": len(scheduler.running),
            "num_held": scheduler.num_held,
            "num_waiting": scheduler.num_waiting,
            "num_deferred": scheduler.num_deferred,
            "waiting_tokens": scheduler.waiting_tokens,
            "kv_pages_used": scheduler.pages.used,
            "oldest_wait": 0.0 if since is None else now - since,
        }
        self._latest = (self.plan_fields, gauges | self._totals())

    def close(self) -> None:
        """Let `snapshot` show the totals alone, because the instance has ended."""
        self._latest = (Snapshot(time=self.snapshot.time), self._totals())

    def _totals(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "preemptions": self._scheduler.num_preemptions,
            "generated_tokens": self._generated,
            "prefill_tokens": self._prefilled,
            "prefix_queries": self._scheduler.prefix_queries,
            "prefix_hits": self._scheduler.prefix_hits,
            "finished": self._finished,
            "first_tokens": self._first_tokens,
            "gaps": self._gaps,
            "gap_seconds": self._gap_seconds,
            "busy_seconds": self.times.busy,
            "expected_seconds": self.times.expected,
        }

    def prompt_done(self, sequence: Sequence) -> None:
        """Count the prompt of a request, whose first sequence this must be, when it has been computed."""
        self._metrics.prompt_tokens(sequence.num_prompt, sequence.num_cached)

    def first_token(self, seconds: float) -> None:
        """Count a first token that came `seconds` after its request's arrival."""
        self._metrics.first_token(seconds)
        counts = list(self._first_tokens)
        counts[bisect_left(TIME_BOUNDS, seconds)] += 1
        self._first_tokens = tuple(counts)

    def step(self, generated: int, prefilled: int, gaps: Mapping[float, int]) -> None:
        """Count the end of a step that generated and computed a number of tokens.

        `prefilled`: tokens of prompts. `gaps`: seconds between two tokens of a sequence -> number of such gaps.
        """
        scheduler = self._scheduler
        self._metrics.generated_tokens(generated)
        self._generated += generated
        self._prefilled += prefilled
        if gaps:
            self._metrics.inter_token(gaps)
            self._gaps += sum(gaps.values())
            self._gap_seconds += sum(gap * count for gap, count in gaps.items())
        totals = (scheduler.num_preemptions, scheduler.prefix_queries, scheduler.prefix_hits)
        if totals != self._reported:
            preemptions, queries, hits = (new - old for new, old in zip(totals, self._reported, strict=True))
            self._metrics.preempted(preemptions)
            self._metrics.prefix_cache(queries, hits)
            self._reported = totals

    def steady(self, count: int, running: int, gap_seconds: float) -> None:
        """Count the ends of `count` steps that decoded `running` sequences each, and the starts of `count - 1` steps.

        `gap_seconds`: the sum of all gaps. Only simulations call this, so the metrics are not updated.
        """
        self.steps += count - 1
        self._generated += count * running
        self._gaps += count * running
        self._gap_seconds += gap_seconds

    def ended(self, state: RequestState) -> None:
        """Count the end of a request."""
        self._finished += len(state.sequences)


def observe_end(metrics: InstanceMetrics, state: RequestState, reason: FinishReason, now: float) -> None:
    """Record the end of a request in the metrics. It has no sequences if no core has ever had it."""
    request, lengths = state.request, [s.num_generated for s in state.sequences]
    tpot = queue = prefill = decode = computed = None
    if state.sequences:
        first = state.sequences[0]
        if first.first_token is not None and first.last_token is not None:
            decode = first.last_token - first.first_token
            tpot = decode / (first.num_generated - 1) if first.num_generated > 1 else None
        if first.first_token is not None and first.first_scheduled is not None:
            prefill = first.first_token - first.first_scheduled
        if first.first_scheduled is not None:
            queue = first.first_scheduled - request.arrival
        ended = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if first.first_token is not None or (ended and not request.generates):
            computed = first.num_prompt - first.num_cached
    metrics.finished(
        reason,
        e2e=now - request.arrival,
        queue=queue,
        prompt_tokens=len(request.prompt_token_ids),
        generated=sum(lengths),
        tpot=tpot,
        prefill=prefill,
        decode=decode,
        computed=computed,
        longest=max(lengths, default=0),
        n=request.params.n,
        max_tokens=None if request.embed else request.params.max_tokens,
    )
