"""Responses of /v1/chat/completions, whole or as a stream."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.core.request import CompletionOutput, TokenLogprobs
from jaxserve.parsing.events import ArgumentsDelta, CallBegun, Event, ParsedMessage, ReasoningDelta, TextDelta
from jaxserve.parsing.parser import AnswerFormat
from jaxserve.server.answers.generation import GeneratedAnswer, GenerationResponse, PromptResult, Usage
from jaxserve.server.answers.logprobs import format_chat_logprobs, format_prompt_logprobs
from jaxserve.server.answers.tokens import AnswerParser
from jaxserve.server.schemas.chat import ChatBody


@dataclass
class _Answer:
    """One of the n answers of a stream, as far as it has been sent."""

    parser: AnswerParser
    calls: int = 0


@dataclass
class ChatResponse(GenerationResponse[ChatBody]):
    """The JSON objects that answer one chat completion. `form`: what its answers consist of."""

    object_type = "chat.completion"
    chunk_type = "chat.completion.chunk"

    form: AnswerFormat = field(kw_only=True)

    _answers: dict[int, _Answer] = field(default_factory=dict)  # by index of the answer
    _reasoning_tokens: int = 0  # of answers that are not streamed

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
        parser = self._parser()
        message = ParsedMessage.of(self._visible(parser.whole(answer.whole())))
        self._reasoning_tokens += parser.reasoning_tokens
        choice = {
            "index": answer.index,
            "message": self._message(message),
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": self._finish_reason(answer.finish_reason, len(message.calls)),
            "stop_reason": answer.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _parser(self) -> AnswerParser:
        return AnswerParser(self.form, lambda: self.client.tokenizer.stream(self.job.params[0].skip_special_tokens))

    def _usage(self, usage: Usage) -> dict[str, object]:
        reasoning = self._reasoning_tokens + sum(sent.parser.reasoning_tokens for sent in self._answers.values())
        return {**usage.as_dict(), "completion_tokens_details": {"reasoning_tokens": reasoning}}

    def _message(self, parsed: ParsedMessage) -> dict[str, Any]:
        message = {"role": "assistant", "content": parsed.text, "refusal": None}
        if parsed.reasoning:
            message |= _reasoning(parsed.reasoning)
        if parsed.calls:
            calls = [self._begin_call(i, call.name, call.arguments) for i, call in enumerate(parsed.calls)]
            message |= {"content": parsed.text or None, "tool_calls": calls}
        return message

    def _chunks(self, prompt: int, answer: CompletionOutput) -> Iterator[dict[str, Any]]:
        """Yield the role if the answer has just begun, then what is new of it, then why it ended."""
        if answer.index not in self._answers:
            yield self._role_chunk(prompt, answer.index)
            self._answers[answer.index] = _Answer(self._parser())
        sent = self._answers[answer.index]
        deltas = [self._delta(sent, event) for event in self._visible(sent.parser.push(answer))]
        if not deltas and (answer.logprobs or (answer.token_ids and self.body.return_token_ids)):
            deltas = [{}]
        fields: dict[str, Any] = {"logprobs": self._logprobs(answer.logprobs or ())}
        if self.body.return_token_ids:
            fields["token_ids"] = answer.token_ids
        for delta in deltas:
            yield self._chunk(answer.index, delta, **fields)
            fields = {}  # once for all events of the same tokens
        if answer.finish_reason:
            # An event of its own: some clients ignore the text of an event with a finish_reason.
            stop = {} if answer.stop_reason is None else {"stop_reason": answer.stop_reason}
            reason = self._finish_reason(answer.finish_reason, sent.calls)
            yield self._chunk(answer.index, {}, finish_reason=reason, **stop)

    def _finish_reason(self, reason: str | None, calls: int) -> str | None:
        """Return OpenAI's reason why an answer ended: its calls, unless it was cut or the client named the tool."""
        named = self.form.tool_use is not None and self.form.tool_use.named
        return "tool_calls" if calls and reason == "stop" and not named else reason

    def _visible(self, events: list[Event]) -> list[Event]:
        if self.body.include_reasoning:
            return events
        return [event for event in events if not isinstance(event, ReasoningDelta)]

    def _delta(self, sent: _Answer, event: Event) -> dict[str, Any]:
        match event:
            case TextDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return _reasoning(text)
            case CallBegun(name):
                sent.calls += 1
                index = sent.calls - 1
                return {"tool_calls": [{"index": index, **self._begin_call(index, name, "")}]}
            case ArgumentsDelta(text):
                return {"tool_calls": [{"index": sent.calls - 1, "function": {"arguments": text}}]}

    def _begin_call(self, index: int, name: str, arguments: str) -> dict[str, Any]:
        call_id = self.form.new_call_id(name, index)
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _role_chunk(self, prompt: int, index: int) -> dict[str, Any]:
        chunk = self._chunk(index, {"role": "assistant", "content": ""})
        if not self._answers and self.body.return_token_ids:  # once per stream
            chunk["prompt_token_ids"] = self.job.prompts[prompt].token_ids
        if not self._answers and self.body.prompt_logprobs is not None:
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


def _reasoning(text: str) -> dict[str, str]:
    # DeepSeek's name and OpenRouter's: clients look for either.
    return {"reasoning_content": text, "reasoning": text}
