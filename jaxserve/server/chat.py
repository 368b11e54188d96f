"""The answer of a chat completion: whole, or as the values of a stream."""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.core.request import CompletionOutput, TokenLogprobs
from jaxserve.engine.client import EngineClient
from jaxserve.server.generation import Answer, Job, Usage
from jaxserve.server.logprobs import for_chat, for_prompt
from jaxserve.server.schemas.chat import ChatBody


@dataclass(frozen=True)
class ChatAnswer:
    """How to answer one request. `model` and `created` are repeated in every object."""

    client: EngineClient
    job: Job
    body: ChatBody
    model: str
    created: int

    async def whole(self) -> dict[str, Any]:
        """The response of a request that does not stream."""
        (answers,), (last,), usage = await self.job.collect(self.client)
        response = self._object("chat.completion", [self._choice(answer) for answer in answers])
        response["usage"] = usage.as_dict()
        if self.body.return_token_ids:
            response["prompt_token_ids"] = self.job.prompts[0].token_ids
        if last.prompt_logprobs is not None:
            response["prompt_logprobs"] = for_prompt(last.prompt_logprobs, self.client.tokenizer)
        return response

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The values of a stream: per answer its role, then what is new, then why it ended."""
        usage, started = self.job.usage(), set[int]()
        async with contextlib.aclosing(self.job.run(self.client)) as deltas:
            async for delta in deltas:
                usage.add(delta)
                for answer in delta[1].outputs:
                    if answer.index not in started:
                        yield self._first(answer.index, usage, alone=not started)
                        started.add(answer.index)
                    if answer.text or answer.logprobs or (answer.token_ids and self.body.return_token_ids):
                        yield self._news(answer, usage)
                    if answer.finish_reason:
                        yield self._last(answer, usage)
        if self.body.usage_at_end:
            yield {**self._object("chat.completion.chunk", []), "usage": usage.as_dict()}

    def _choice(self, answer: Answer) -> dict[str, Any]:
        choice = {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _first(self, index: int, usage: Usage, *, alone: bool) -> dict[str, Any]:
        """The role of an answer. `alone`: no other answer has begun, so that the prompt has not been told yet."""
        chunk = self._chunk(usage, index, {"role": "assistant", "content": ""})
        if alone and self.body.return_token_ids:
            chunk["prompt_token_ids"] = self.job.prompts[0].token_ids
        return chunk

    def _news(self, answer: CompletionOutput, usage: Usage) -> dict[str, Any]:
        """What is new of an answer."""
        fields: dict[str, Any] = {"logprobs": self._logprobs(answer.logprobs or ())}
        if self.body.return_token_ids:
            fields["token_ids"] = answer.token_ids
        return self._chunk(usage, answer.index, {"content": answer.text} if answer.text else {}, **fields)

    def _last(self, answer: CompletionOutput, usage: Usage) -> dict[str, Any]:
        """Why an answer has ended: an event of its own, for clients that do not look for text beside it."""
        fields: dict[str, Any] = {"finish_reason": answer.finish_reason}
        if answer.stop_reason is not None:
            fields["stop_reason"] = answer.stop_reason
        return self._chunk(usage, answer.index, {}, **fields)

    def _chunk(self, usage: Usage, index: int, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        chunk = self._object("chat.completion.chunk", [choice])
        if self.body.usage_at_end:
            chunk["usage"] = usage.as_dict() if self.body.usage_always else None
        return chunk

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.job.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _logprobs(self, steps: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        alternatives = self.body.num_logprobs
        if alternatives is None:
            return None
        return for_chat(steps, self.client.tokenizer, alternatives, ids=self.body.return_tokens_as_token_ids)
