"""Responses of /v1/messages: the events of a stream, and the whole message, to which the same events add up."""

import contextlib
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxserve.core.request import CompletionOutput
from jaxserve.engine.client import EngineClient
from jaxserve.parsing.parser import AnswerFormat
from jaxserve.server.answers.generation import GeneratedAnswer, Job, PromptResult, Usage
from jaxserve.server.http.json_text import to_json
from jaxserve.server.http.offload import off_loop_if_large
from jaxserve.server.messages.content_blocks import ContentBlocks, StreamEvent, input_of
from jaxserve.server.schemas.messages import MessagesBody


@dataclass(frozen=True)
class MessageResponse:
    """The response to one request, whole or as a stream. `form`: what the answer consists of."""

    client: EngineClient
    job: Job
    body: MessagesBody
    model: str
    form: AnswerFormat

    async def whole(self) -> bytes:
        """Generate everything and return the JSON response of a request that does not stream."""
        usage = self.job.usage()
        async with contextlib.aclosing(self.job.results(self.client, usage)) as results:
            (result,) = [result async for result in results]
        return await off_loop_if_large(result.size, self._write, result, usage)

    def _write(self, result: PromptResult, usage: Usage) -> bytes:
        (answer,) = result.answers
        return to_json(message_of([self._start(usage), *self._more(self._blocks(), answer, usage)]))

    async def events(self) -> AsyncGenerator[StreamEvent, None]:
        """Yield the events of a stream, from the first token on."""
        usage, blocks, begun = self.job.usage(), self._blocks(), False
        async with contextlib.aclosing(self.job.run(self.client)) as deltas:
            async for delta in deltas:
                usage.add(delta)
                if not begun:
                    yield self._start(usage)
                    begun = True
                for answer in delta[1].outputs:
                    for event in self._more(blocks, answer, usage):
                        yield event

    def _blocks(self) -> ContentBlocks:
        return ContentBlocks(self.form, self.body.thinking_display, self.body.eager_tools)

    def _start(self, usage: Usage) -> StreamEvent:
        message = {
            "id": self.job.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }
        return {"type": "message_start", "message": message}

    def _more(
        self, blocks: ContentBlocks, answer: CompletionOutput | GeneratedAnswer, usage: Usage
    ) -> Iterator[StreamEvent]:
        """Yield the events for new text, and at the end of the answer those that end the message."""
        yield from blocks.push(answer.text)
        if answer.finish_reason:
            sequence = answer.stop_reason if answer.stop_reason in (self.body.stop_sequences or ()) else None
            yield from blocks.finish(cut=answer.finish_reason == "length" or sequence is not None)
            if answer.finish_reason == "length":
                reason = self._limit(usage)
            elif sequence is not None:
                reason = "stop_sequence"
            else:
                reason = "tool_use" if blocks.num_calls else "end_turn"
            stop = {"stop_reason": reason, "stop_sequence": sequence}
            yield {"type": "message_delta", "delta": stop, "usage": _usage(usage)}
            yield {"type": "message_stop"}

    def _limit(self, usage: Usage) -> str:
        """Return the name of the limit at which the answer was cut."""
        is_full = usage.prompt_tokens + usage.completion_tokens >= self.client.info.max_model_len
        by_context = is_full and usage.completion_tokens < self.body.max_tokens
        return "model_context_window_exceeded" if by_context else "max_tokens"


def message_of(events: Iterable[StreamEvent]) -> dict[str, Any]:
    """Return the message that the events of a stream add up to."""
    message: dict[str, Any] = {}
    for event in events:
        match event:
            case {"type": "message_start", "message": started}:
                message = started
            case {"type": "content_block_start", "content_block": block}:
                message["content"].append(block)
                input_json = ""
            case {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": text}}:
                input_json += text
            case {"type": "content_block_delta", "delta": {"type": _, **delta}}:
                for name, text in delta.items():
                    message["content"][-1][name] += text
            case {"type": "content_block_stop"} if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = input_of(input_json)
            case {"type": "message_delta", "delta": stop, "usage": usage}:
                message |= {**stop, "usage": usage}
    return message


def _usage(usage: Usage) -> dict[str, int]:
    cached = sum(usage.cached_tokens.values())
    return {
        "input_tokens": usage.prompt_tokens - cached,  # Anthropic's total is the sum of the three
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }
