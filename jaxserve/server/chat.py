"""Responses of /v1/chat/completions, whole or as a stream."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.core.request import CompletionOutput, TokenLogprobs
from jaxserve.server.generation import GeneratedAnswer, GenerationResponse, PromptResult
from jaxserve.server.logprobs import format_chat_logprobs, format_prompt_logprobs
from jaxserve.server.schemas.chat import ChatBody


@dataclass
class ChatResponse(GenerationResponse[ChatBody]):
    """The JSON objects that answer one chat completion."""

    object_type = "chat.completion"
    chunk_type = "chat.completion.chunk"

    _started: set[int] = field(default_factory=set)  # answers whose role has been sent

    def _final_choices(self, result: PromptResult) -> list[dict[str, Any]]:
        return [self._choice(answer) for answer in result.answers]

    def _final_fields(self, result: PromptResult) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = self.job.prompts[0].token_ids
        if result.last.prompt_logprobs is not None:
            fields["prompt_logprobs"] = format_prompt_logprobs(result.last.prompt_logprobs, self.client.tokenizer)
        return fields

    def _choice(self, answer: GeneratedAnswer) -> dict[str, Any]:
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

    def _chunks(self, prompt: int, answer: CompletionOutput) -> Iterator[dict[str, Any]]:
        """Yield the role if the answer has just begun, then its new content, then why it ended."""
        if answer.index not in self._started:
            yield self._role_chunk(prompt, answer.index)
            self._started.add(answer.index)
        if answer.text or answer.logprobs or (answer.token_ids and self.body.return_token_ids):
            fields: dict[str, Any] = {"logprobs": self._logprobs(answer.logprobs or ())}
            if self.body.return_token_ids:
                fields["token_ids"] = answer.token_ids
            yield self._chunk(answer.index, {"content": answer.text} if answer.text else {}, **fields)
        if answer.finish_reason:
            # An event of its own: some clients ignore the text of an event with a finish_reason.
            stop = {} if answer.stop_reason is None else {"stop_reason": answer.stop_reason}
            yield self._chunk(answer.index, {}, finish_reason=answer.finish_reason, **stop)

    def _role_chunk(self, prompt: int, index: int) -> dict[str, Any]:
        chunk = self._chunk(index, {"role": "assistant", "content": ""})
        if not self._started and self.body.return_token_ids:  # once per stream
            chunk["prompt_token_ids"] = self.job.prompts[prompt].token_ids
        if not self._started and self.body.prompt_logprobs is not None:
            chunk["prompt_logprobs"] = format_prompt_logprobs(self._prompt_logprobs[prompt], self.client.tokenizer)
        return chunk

    def _chunk(self, index: int, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        return self._object(self.chunk_type, [choice])

    def _logprobs(self, steps: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        alternatives = self.body.num_logprobs
        if alternatives is None:
            return None
        return format_chat_logprobs(
            steps, self.client.tokenizer, alternatives, ids=self.body.return_tokens_as_token_ids
        )
