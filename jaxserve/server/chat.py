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
        if last.prompt_logprobs is not None:
            response["prompt_logprobs"] = for_prompt(last.prompt_logprobs, self.client.tokenizer)
        return response

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The values of a stream: per answer its role, then what is new."""
        usage, started = self.job.usage(), set[int]()
        async with contextlib.aclosing(self.job.run(self.client)) as deltas:
            async for delta in deltas:
                usage.add(delta)
                for answer in delta[1].outputs:
                    if answer.index not in started:
                        started.add(answer.index)
                        yield self._chunk(answer.index, {"role": "assistant", "content": ""}, usage)
                    if answer.text or answer.finish_reason or answer.logprobs:
                        yield self._news(answer, usage)
        if self.body.usage_at_end:
            yield {**self._object("chat.completion.chunk", []), "usage": usage.as_dict()}

    def _choice(self, answer: Answer) -> dict[str, Any]:
        return {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }

    def _news(self, answer: CompletionOutput, usage: Usage) -> dict[str, Any]:
        delta = {"content": answer.text} if answer.text else {}
        return self._chunk(answer.index, delta, usage, answer)

    def _chunk(
        self, index: int, delta: dict[str, Any], usage: Usage, answer: CompletionOutput | None = None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(answer.logprobs or ()) if answer else None,
            "finish_reason": answer.finish_reason if answer else None,
        }
        if answer and answer.stop_reason is not None:
            choice["stop_reason"] = answer.stop_reason
        chunk = self._object("chat.completion.chunk", [choice])
        if self.body.usage_at_end:
            chunk["usage"] = usage.as_dict() if self.body.usage_always else None
        return chunk

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.job.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _logprobs(self, steps: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        alternatives = self.body.num_logprobs
        return None if alternatives is None else for_chat(steps, self.client.tokenizer, alternatives)
