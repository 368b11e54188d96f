"""The outputs of a request: the new part after each step, and the merging of such parts."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from jaxserve.core.errors import JaxserveError
from jaxserve.core.request import (
    CompletionOutput,
    FinishReason,
    Request,
    RequestMetrics,
    RequestOutput,
    Sequence,
    SequenceStatus,
    TokenLogprobs,
)
from jaxserve.engine.text import flush_text
from jaxserve.telemetry.tracing import EndedRequest


@dataclass(eq=False)
class RequestState:
    """A request in flight: its sequences, and how much of each has been returned in outputs."""

    request: Request
    sequences: list[Sequence]  # none before a core has it
    returned_tokens: list[int] = field(default_factory=list)  # by sequence
    returned_characters: list[int] = field(default_factory=list)  # by sequence
    returned_prompt: bool = False  # the log-probabilities of the prompt
    unfinished: int = 0
    failures: int = 0  # times that its instance has failed while it ran
    finished_at: float | None = None

    def __post_init__(self) -> None:
        self.returned_tokens = [0] * len(self.sequences)
        self.returned_characters = [0] * len(self.sequences)
        self.unfinished = len(self.sequences)

    @property
    def unfinished_sequences(self) -> list[Sequence]:
        """The sequences that have not ended."""
        return [sequence for sequence in self.sequences if sequence.status is not SequenceStatus.FINISHED]

    def take(self, changed: Iterable[Sequence]) -> RequestOutput:
        """Return the new parts of the changed sequences, and mark them as returned."""
        first, finished = self.sequences[0], self.unfinished == 0
        return RequestOutput(
            request_id=self.request.id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=tuple([self._take_sequence(sequence) for sequence in changed]),
            finished=finished,
            prompt_logprobs=self._take_prompt(finished),
            num_cached_tokens=first.num_cached,
            metrics=self.metrics if finished else None,
            embedding=first.embedding,
        )

    def _take_prompt(self, finished: bool) -> tuple[TokenLogprobs | None, ...] | None:
        """Return the prompt's log-probabilities once: with the first tokens of a stream, otherwise at the end.

        The first sequence computes them. Its siblings wait until its prompt is computed.
        """
        if self.returned_prompt or not (finished or self.request.stream) or self.request.params.prompt_logprobs is None:
            return None
        self.returned_prompt = True
        return tuple(self.sequences[0].prompt_logprobs)

    def end_by_length(self, now: float) -> RequestOutput:
        """End the request, of which no core has a part, at its present length. Return its last output."""
        unfinished = self.unfinished_sequences
        for sequence in unfinished:
            sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, FinishReason.LENGTH
            flush_text(sequence)
        self.unfinished, self.finished_at = 0, now
        return self.take(unfinished)

    def failed(self, error: JaxserveError) -> RequestOutput:
        """Return the last output of a request that has ended with an error."""
        return failed_output(self.request, error)

    def ended(self, reason: FinishReason, now: float) -> EndedRequest:
        """Return what the request did, when it has ended for `reason` at time `now`."""
        return EndedRequest(
            request=self.request,
            times=self.metrics,
            now=now,
            reason=reason,
            reasons=[(s.finish_reason or reason).value for s in self.sequences]
            or [reason.value] * self.request.params.n,
            output_tokens=sum(s.num_generated for s in self.sequences),
            cached_tokens=self.sequences[0].num_cached if self.sequences else 0,
        )

    def _take_sequence(self, sequence: Sequence) -> CompletionOutput:
        index, tokens = sequence.index, sequence.tokens
        start_token, start_text = self.returned_tokens[index], self.returned_characters[index]
        end_text = max(len(sequence.text) - sequence.held, start_text)
        self.returned_tokens[index], self.returned_characters[index] = len(tokens) - sequence.num_prompt, end_text
        return CompletionOutput(
            index=index,
            text=sequence.text[start_text:end_text],
            token_ids=tuple(tokens[sequence.num_prompt + start_token :]),
            cumulative_logprob=sequence.cumulative_logprob if sequence.logprobs else None,
            logprobs=tuple(sequence.logprobs[start_token:]) if sequence.params.logprobs is not None else None,
            finish_reason=sequence.finish_reason.value if sequence.finish_reason else None,
            stop_reason=sequence.stop_reason,
        )

    @property
    def metrics(self) -> RequestMetrics:
        """Times of the request: the earliest starts and the latest end of its sequences."""

        def earliest(values: Iterable[float | None]) -> float | None:
            return min((v for v in values if v is not None), default=None)

        return RequestMetrics(
            arrival=self.request.arrival,
            first_scheduled=earliest(s.first_scheduled for s in self.sequences),
            first_token=earliest(s.first_token for s in self.sequences),
            last_token=max((s.last_token for s in self.sequences if s.last_token is not None), default=None),
            finished=self.finished_at,
        )


def failed_output(request: Request, error: JaxserveError) -> RequestOutput:
    """Return the last output of a request that has ended with an error."""
    return RequestOutput(request.id, request.prompt, request.prompt_token_ids, outputs=(), finished=True, error=error)


def merge(whole: RequestOutput | None, piece: RequestOutput) -> RequestOutput:
    """Return the output of a request so far, extended by a new part. `whole` is None before the first part."""
    if whole is None:
        return replace(piece, outputs=tuple(sorted(piece.outputs, key=lambda o: o.index)))
    outputs = {output.index: output for output in whole.outputs}
    for new in piece.outputs:
        old = outputs.get(new.index)
        outputs[new.index] = new if old is None else _extend(old, new)
    prompt = whole.prompt_logprobs if piece.prompt_logprobs is None else piece.prompt_logprobs
    return replace(piece, outputs=tuple(outputs[index] for index in sorted(outputs)), prompt_logprobs=prompt)


def _extend(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    logprobs = None if new.logprobs is None else (old.logprobs or ()) + new.logprobs
    return replace(new, text=old.text + new.text, token_ids=old.token_ids + new.token_ids, logprobs=logprobs)
