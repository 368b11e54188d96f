"""Responses of /v1/completions, whole or as a stream."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.core.request import CompletionOutput, RequestOutput, TokenLogprobs
from jaxserve.server.answers.generation import GeneratedAnswer, GenerationResponse, PromptLogprobs, PromptResult
from jaxserve.server.answers.logprobs import (
    Offsets,
    format_completion_logprobs,
    format_prompt_logprobs,
    token_as_id,
    token_writer,
)
from jaxserve.server.schemas.completions import CompletionBody

NO_TEXT = ""


@dataclass
class CompletionResponse(GenerationResponse[CompletionBody]):
    """The JSON objects that answer one text completion.

    With n answers per prompt, the choices of prompt p have the indices p * n to p * n + n - 1. `echoed` has the place
    of each prompt in the tokens that the engine gets, which may also hold a suffix.
    """

    object_type = chunk_type = "text_completion"

    echoed: Sequence[slice] = field(kw_only=True)
    _offsets: dict[int, Offsets | None] = field(default_factory=dict)  # by index of a choice that has begun

    def _final_choices(self, result: PromptResult) -> list[dict[str, Any]]:
        best = result.answers
        if self.body.ranked:
            best = sorted(best, key=lambda answer: -answer.mean_logprob)[: self.body.answers]
        return [self._choice(result.prompt, i, answer, result.last) for i, answer in enumerate(best)]

    def _choice(self, prompt: int, i: int, answer: GeneratedAnswer, last: RequestOutput) -> dict[str, Any]:
        scored = last.prompt_logprobs or ()
        choice = {
            "index": prompt * self.body.answers + i,
            "text": self._echo(prompt, answer.token_ids) + answer.text,
            "logprobs": self._logprobs(*self._with_prompt(prompt, scored, answer), self._new_offsets(prompt)),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = self.job.prompts[prompt].token_ids
            choice["token_ids"] = answer.token_ids
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = format_prompt_logprobs(scored, self.client.tokenizer)
        return choice

    def _chunks(self, prompt: int, answer: CompletionOutput) -> Iterator[dict[str, Any]]:
        """Yield the new text, in the first event after the prompt if it is echoed, then why the choice ended."""
        index = prompt * self.body.answers + answer.index
        shows_prompt = index not in self._offsets and (self.body.echo or self.body.prompt_logprobs is not None)
        if shows_prompt or answer.text or answer.logprobs or (answer.token_ids and self.body.return_token_ids):
            yield self._text_chunk(index, prompt, answer)
        if answer.finish_reason:
            # An event of its own: some clients ignore the text of an event with a finish_reason.
            choice = {"index": index, "text": NO_TEXT, "logprobs": None, "finish_reason": answer.finish_reason}
            if answer.stop_reason is not None:
                choice["stop_reason"] = answer.stop_reason
            yield self._object(self.chunk_type, [choice])

    def _text_chunk(self, index: int, prompt: int, answer: CompletionOutput) -> dict[str, Any]:
        first = index not in self._offsets
        if first:
            self._offsets[index] = self._new_offsets(prompt)
        scored = self._prompt_logprobs.get(prompt, ())
        tokens = self._with_prompt(prompt, scored, answer) if first else (answer.logprobs or (), answer.token_ids)
        choice = {
            "index": index,
            "text": (self._echo(prompt, answer.token_ids) if first else NO_TEXT) + answer.text,
            "logprobs": self._logprobs(*tokens, self._offsets[index]),
            "finish_reason": None,
        }
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = self.job.prompts[prompt].token_ids if first else None
            choice["token_ids"] = answer.token_ids
        if first and self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = format_prompt_logprobs(scored, self.client.tokenizer)
        return self._object(self.chunk_type, [choice])

    def _with_prompt(
        self, prompt: int, scored: PromptLogprobs, answer: GeneratedAnswer | CompletionOutput
    ) -> tuple[PromptLogprobs, Sequence[int]]:
        """Return the log-probabilities and the ids of an answer's tokens, after those of the prompt if it is echoed."""
        steps, token_ids = answer.logprobs or (), answer.token_ids
        if not self.body.echo:
            return steps, token_ids
        place = self.echoed[prompt]
        return [*scored[place], *steps], [*self.job.prompts[prompt].token_ids[place], *token_ids]

    def _echo(self, prompt: int, answer: Sequence[int]) -> str:
        """Return the prompt's text, without a character inside which it ends if the answer's tokens complete it."""
        if not self.body.echo:
            return NO_TEXT
        given = self.job.prompts[prompt]
        if given.text is not None:
            return given.text
        tokenizer, token_ids = self.client.tokenizer, given.token_ids[self.echoed[prompt]]
        text = tokenizer.decode(token_ids)
        return text[:-1] if tokenizer.ends_inside_character(token_ids, answer) else text

    def _new_offsets(self, prompt: int) -> Offsets | None:
        if self.body.logprobs is None:
            return None
        skip, echo = self.body.skip_special_tokens is not False, self.body.echo
        before = () if echo else self.job.prompts[prompt].token_ids
        return Offsets(self.client.tokenizer.stream(skip, start=echo, after=before))

    def _logprobs(
        self, steps: Sequence[TokenLogprobs | None], token_ids: Sequence[int], offsets: Offsets | None
    ) -> dict[str, Any] | None:
        if self.body.logprobs is None or offsets is None:
            return None
        text = token_as_id if self.body.return_tokens_as_token_ids else token_writer(self.client.tokenizer)
        return format_completion_logprobs(steps, token_ids, text, self.body.logprobs, offsets)
