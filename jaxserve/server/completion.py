"""The answer of a text completion: whole, or as the values of a stream."""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.core.request import CompletionOutput, RequestOutput, TokenLogprobs
from jaxserve.engine.client import EngineClient
from jaxserve.server.generation import Answer, Job, Usage
from jaxserve.server.logprobs import Offsets, as_id, as_text, for_completion, for_prompt
from jaxserve.server.schemas.completions import CompletionBody

NO_TEXT = ""


@dataclass(frozen=True)
class CompletionAnswer:
    """How to answer one request. The choices of prompt p are p * n, ..., p * n + n - 1."""

    client: EngineClient
    job: Job
    body: CompletionBody
    model: str
    created: int

    async def whole(self) -> dict[str, Any]:
        """The response of a request that does not stream."""
        by_prompt, last, usage = await self.job.collect(self.client)
        choices = []
        for prompt, answers in enumerate(by_prompt):
            best = sorted(answers, key=lambda answer: -answer.mean_logprob) if self.body.ranked else answers
            for i, answer in enumerate(best[: self.body.answers]):
                choices.append(self._choice(prompt, i, answer, last[prompt]))
        if self.body.scores_only:
            usage.completion_tokens = 0
        return {**self._object(choices), "usage": usage.as_dict()}

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The values of a stream: what is new, after the prompt if it is echoed."""
        usage, offsets = self.job.usage(), dict[int, Offsets | None]()
        async with contextlib.aclosing(self.job.run(self.client)) as deltas:
            async for prompt, output in deltas:
                usage.add((prompt, output))
                for answer in output.outputs:
                    index = prompt * self.body.answers + answer.index
                    echo = NO_TEXT if index in offsets else self._echo(prompt)
                    news = echo or answer.text or answer.logprobs or (answer.token_ids and self.body.return_token_ids)
                    if news:
                        yield self._chunk(index, prompt, echo, answer, offsets, usage)
                    if answer.finish_reason:
                        yield self._last_chunk(index, answer, usage)
        if self.body.usage_at_end:
            yield {**self._object([]), "usage": usage.as_dict()}

    def _choice(self, prompt: int, i: int, answer: Answer, last: RequestOutput) -> dict[str, Any]:
        if self.body.scores_only:
            answer = Answer(i, finish_reason="length")
        steps, token_ids = list[TokenLogprobs | None](answer.logprobs), answer.token_ids
        if self.body.echo:
            steps = [*(last.prompt_logprobs or ()), *steps]
            token_ids = [*self.job.prompts[prompt].token_ids, *token_ids]
        choice = {
            "index": prompt * self.body.answers + i,
            "text": self._echo(prompt) + answer.text,
            "logprobs": self._logprobs(steps, token_ids, self._offsets()),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = self.job.prompts[prompt].token_ids
            choice["token_ids"] = answer.token_ids
        if self.body.prompt_logprobs is not None and last.prompt_logprobs is not None:
            choice["prompt_logprobs"] = for_prompt(last.prompt_logprobs, self.client.tokenizer)
        return choice

    def _chunk(
        self,
        index: int,
        prompt: int,
        echo: str,
        answer: CompletionOutput,
        offsets: dict[int, Offsets | None],
        usage: Usage,
    ) -> dict[str, Any]:
        """What is new of one choice. `offsets`: by choice; mutates it."""
        first = index not in offsets
        if first:
            offsets[index] = self._offsets()
        choice = {
            "index": index,
            "text": echo + answer.text,
            "logprobs": self._logprobs(answer.logprobs or (), answer.token_ids, offsets[index]),
            "finish_reason": None,
        }
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = self.job.prompts[prompt].token_ids if first else None
            choice["token_ids"] = answer.token_ids
        return self._event(choice, usage)

    def _last_chunk(self, index: int, answer: CompletionOutput, usage: Usage) -> dict[str, Any]:
        """Why a choice has ended: an event of its own, for clients that do not look for text beside it."""
        choice = {"index": index, "text": NO_TEXT, "logprobs": None, "finish_reason": answer.finish_reason}
        if answer.stop_reason is not None:
            choice["stop_reason"] = answer.stop_reason
        return self._event(choice, usage)

    def _event(self, choice: dict[str, Any], usage: Usage) -> dict[str, Any]:
        chunk = self._object([choice])
        if self.body.usage_at_end:
            chunk["usage"] = usage.as_dict() if self.body.usage_always else None
        return chunk

    def _echo(self, prompt: int) -> str:
        if not self.body.echo:
            return NO_TEXT
        asked = self.job.prompts[prompt]
        return self.client.tokenizer.decode(asked.token_ids) if asked.text is None else asked.text

    def _offsets(self) -> Offsets | None:
        """Of a new choice; None without log-probabilities."""
        if self.body.logprobs is None:
            return None
        return Offsets(self.client.tokenizer.stream(self.body.skip_special_tokens is not False, start=self.body.echo))

    def _logprobs(
        self, steps: Sequence[TokenLogprobs | None], token_ids: Sequence[int], offsets: Offsets | None
    ) -> dict[str, Any] | None:
        if self.body.logprobs is None or offsets is None:
            return None
        text = as_id if self.body.return_tokens_as_token_ids else as_text(self.client.tokenizer)
        return for_completion(steps, token_ids, text, self.body.logprobs, offsets)

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.job.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
