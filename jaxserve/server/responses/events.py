"""The events of a response, and the response that they add up to."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from jaxserve.core.errors import QueueFull, RequestError
from jaxserve.core.request import CompletionOutput, TokenLogprobs
from jaxserve.parsing.events import Call, CallBegun, Event, ParsedMessage, Part, Reasoning, ReasoningDelta, TextDelta
from jaxserve.server.answers.conversation import ConversationJob
from jaxserve.server.answers.logprobs import format_chat_logprobs
from jaxserve.server.answers.tokens import ReasoningTokens, TextLogprobs, TokenTexts
from jaxserve.server.errors import response_parts
from jaxserve.server.responses.items import Json, OutputItem, Shown


class ResponseEvents:
    """Turns one answer into the events of a stream, and into the response, which is what the events add up to.

    `head`: the fields of the response that do not change. Methods that return events mutate the response; the events
    have ascending sequence numbers from 0.
    """

    def __init__(self, head: Json, work: ConversationJob, shown: Shown, clock: Callable[[], int]):
        self.status = "queued" if head["background"] else "in_progress"
        self.cached_tokens = 0
        self._head, self._shown, self._clock = head, shown, clock
        self._form, self._tokenizer = work.form, work.client.tokenizer
        self._prompt_tokens = work.job.usage().prompt_tokens
        self._parser = self._form.parser()
        self._message = ParsedMessage()
        self._items: list[OutputItem] = []
        self._texts = TokenTexts(self._tokenizer.stream(work.job.params[0].skip_special_tokens))
        self._divided = self._form.section is not None or shown.alternatives is not None
        self._logprobs = TextLogprobs()
        self._reasoning = ReasoningTokens(self._form.section)
        self._tokens = self._number = 0
        self._ending: Json = {}  # fields that are known at the end

    @property
    def id(self) -> str:
        """The id of the response."""
        return str(self._head["id"])

    @property
    def ended(self) -> bool:
        """True if nothing will change any more."""
        return self.status not in ("queued", "in_progress")

    @property
    def output(self) -> list[Json]:
        """The items so far."""
        return [item.as_dict() for item in self._items]

    def response(self) -> Json:
        """Return the response so far."""
        open_fields = {"error": None, "incomplete_details": None, "completed_at": None, "usage": None}
        return {**self._head, "status": self.status, "output": self.output, **open_fields, **self._ending}

    def begin(self) -> list[Json]:
        """Return the events of a response that has been accepted, none if they have been returned before."""
        return [] if self._number else [self._snapshot("created"), self._snapshot(self.status)]

    def run(self) -> list[Json]:
        """Return the event of a queued response that begins to run, none if it was not queued."""
        if self.status != "queued":
            return []
        self.status = "in_progress"
        return [self._snapshot("in_progress")]

    def add(self, new: CompletionOutput) -> list[Json]:
        """Return the events for new output, and the last ones if the answer ends with it."""
        self._tokens += len(new.token_ids)
        pieces = self._texts.split(new) if self._divided else [(new.text, (), len(new.token_ids))]
        found: list[tuple[Event, Sequence[TokenLogprobs]]] = []
        for text, logprobs, tokens in pieces:
            parsed = self._parser.push(text)
            self._reasoning.add(text, tokens, parsed)
            self._logprobs.add(text, logprobs)
            found += self._with_logprobs(parsed)
        if new.finish_reason:
            found += self._with_logprobs(self._parser.finish())
        events = self._fold(found)
        if new.finish_reason:
            events += self._finish(cut=new.finish_reason == "length")
        return events

    @property
    def number(self) -> int:
        """The number of the next event."""
        return self._number

    def fail(self, error: Exception, sent: int) -> list[Json]:
        """Return the last events of a response that an error ends.

        `sent`: the number of events that its client has got. What others said is forgotten: items that it does not
        know, ends that it has not seen.
        """
        if self.ended:
            self.status = "in_progress"
        self._number = sent
        self._items = [item for item in self._items if item.begun is None or item.begun < sent]
        if self._items and (self._items[-1].done is None or self._items[-1].done >= sent):
            self._items[-1].status = "in_progress"
        begin = self.begin()
        cause = response_parts(error)[1]["error"]
        code = "server_error"
        if isinstance(error, RequestError):
            code = "rate_limit_exceeded" if isinstance(error, QueueFull) else "invalid_prompt"
        shown = {name: cause[name] for name in ("code", "message", "param")}
        closed = self._close("incomplete")
        self._ending = {"error": {"code": code, "message": cause["message"]}}
        return [*begin, *closed, self._event("error", **shown), self._end("failed")]

    def fail_plainly(self, sent: int) -> tuple[list[Json], Json]:
        """Return the last events and the response if its answer cannot be shown: neither has any part of it."""
        shown = response_parts(RuntimeError())[1]["error"]
        ending = {"output": [], "incomplete_details": None, "completed_at": None, "usage": None}
        failed = {**self._head, **ending, "status": "failed", "error": {"code": "server_error", **_message(shown)}}
        created = {"type": "response.created", "response": {**failed, "status": "in_progress", "error": None}}
        error = {"type": "error", "code": "server_error", "param": None, **_message(shown)}
        last = [*([] if sent else [created]), error, {"type": "response.failed", "response": failed}]
        self._items, self.status, self._number = [], "failed", sent + len(last)
        return [{**event, "sequence_number": sent + index} for index, event in enumerate(last)], failed

    def cancel(self) -> None:
        """End the response because its client does not want it any more, for which there is no event."""
        if not self.ended:
            self._close("incomplete")
            self.status = "cancelled"

    def _finish(self, *, cut: bool) -> list[Json]:
        events: list[Json] = []
        if not cut and all(isinstance(item.part, Reasoning) for item in self._items):
            events += self._fold([(TextDelta(""), ())])  # clients expect an answer to have a message
        events += self._close("incomplete" if cut else "completed")
        self._ending = {"usage": self._usage()}
        if cut:
            self._ending["incomplete_details"] = {"reason": "max_output_tokens"}
            return [*events, self._end("incomplete")]
        self._ending["completed_at"] = self._clock()
        return [*events, self._end("completed")]

    def _usage(self) -> Json:
        return {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self._tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning.count},
            "total_tokens": self._prompt_tokens + self._tokens,
        }

    def _with_logprobs(self, parsed: Iterable[Event]) -> Iterator[tuple[Event, Sequence[TokenLogprobs]]]:
        for event in parsed:
            yield event, self._logprobs.take(event.text) if isinstance(event, TextDelta) else ()

    def _fold(self, found: Iterable[tuple[Event, Sequence[TokenLogprobs]]]) -> list[Json]:
        """Add parsed events, with their log-probabilities, to the items. Return the events about the items.

        Texts that have arrived at once are one delta.
        """
        events: list[Json] = []
        for kind, group in groupby(found, key=lambda event: type(event[0])):
            if kind is CallBegun:
                for event, _ in group:
                    events += self._begin(event)
                continue
            parts = list(group)
            text = "".join(getattr(event, "text", "") for event, _ in parts)
            events += self._begin(kind(text))
            if text:
                events += self._grow(kind, text, [entry for _, logprobs in parts for entry in logprobs])
        return events

    def _begin(self, event: Event) -> list[Json]:
        """Add a parsed event to the answer, and return the events about an item that begins with it."""
        part = self._message.add(event)
        if len(self._message.parts) == len(self._items):
            return []
        return [*self._close("completed"), *self._open(part)]

    def _open(self, part: Part) -> list[Json]:
        index = len(self._message.calls) - 1
        call_id = self._form.new_call_id(part.name, index) if isinstance(part, Call) else ""
        item = OutputItem(part, self._shown, call_id, begun=self._number)
        self._items.append(item)
        events = [self._event("response.output_item.added", **self._place, item=item.as_dict(empty=True))]
        if not isinstance(part, Call):
            events.append(self._of_content("response.content_part.added", part=item.content(empty=True)))
        return events

    def _grow(self, kind: type[Event], text: str, logprobs: Sequence[TokenLogprobs]) -> list[Json]:
        item = self._items[-1]
        if kind is TextDelta:
            entries = self._entries(logprobs)
            item.logprobs += entries
            return [self._of_content("response.output_text.delta", delta=text, logprobs=entries)]
        if kind is ReasoningDelta:
            return [self._of_content("response.reasoning_text.delta", delta=text)]
        # A custom tool's text is known when the JSON around it is complete.
        return [] if item.is_custom else [self._of_item("response.function_call_arguments.delta", delta=text)]

    def _close(self, status: str) -> list[Json]:
        """Return the events at the end of the last item, none if there is none or it has ended."""
        if not self._items or self._items[-1].status != "in_progress":
            return []
        item = self._items[-1]
        item.status, item.done = status, self._number
        match item.part:
            case Call() if not item.is_custom:
                kind = "response.function_call_arguments.done"
                events = [self._of_item(kind, name=item.called["name"], arguments=item.argument)]
            case Call():
                delta = self._of_item("response.custom_tool_call_input.delta", delta=item.argument)
                events = [delta, self._of_item("response.custom_tool_call_input.done", input=item.argument)]
            case Reasoning(text):
                events = [self._of_content("response.reasoning_text.done", text=text)]
            case part:
                logprobs = [*item.logprobs]
                events = [self._of_content("response.output_text.done", text=part.text, logprobs=logprobs)]
        if not isinstance(item.part, Call):
            events.append(self._of_content("response.content_part.done", part=item.content()))
        return [*events, self._event("response.output_item.done", **self._place, item=item.as_dict())]

    def _end(self, status: str) -> Json:
        self.status = status
        return self._snapshot(status)

    def _entries(self, logprobs: Sequence[TokenLogprobs]) -> list[Json]:
        if self._shown.alternatives is None:
            return []
        entries: list[Json] = format_chat_logprobs(logprobs, self._tokenizer, self._shown.alternatives)["content"]
        return entries

    @property
    def _place(self) -> Json:
        return {"output_index": len(self._items) - 1}

    def _of_item(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, item_id=self._items[-1].id, **self._place, **fields)

    def _of_content(self, kind: str, **fields: Any) -> Json:
        return self._of_item(kind, content_index=0, **fields)

    def _snapshot(self, name: str) -> Json:
        return self._event(f"response.{name}", response=self.response())

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event


def _message(error: Json) -> Json:
    return {"message": error["message"]}
