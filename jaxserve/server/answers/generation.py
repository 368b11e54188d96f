"""Generation for one HTTP request: its prompts are run, and their answers become OpenAI's JSON objects."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from jaxserve.core.request import CompletionOutput, RequestOutput, TokenLogprobs, TraceContext
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.client import EngineClient, ModelInfo, TokensPrompt
from jaxserve.server.http.json_text import to_json
from jaxserve.server.http.offload import MAX_INLINE_SIZE, off_loop, off_loop_if_large
from jaxserve.server.schemas.common import SamplingBody

Delta = tuple[int, RequestOutput]  # index of the prompt, and its new output
PromptLogprobs = Sequence[TokenLogprobs | None]  # by token of the prompt; None for the first one
Names = Callable[[], contextlib.AbstractContextManager[None]]
BodyT = TypeVar("BodyT", bound=SamplingBody)


@dataclass
class GeneratedAnswer:
    """One of the n answers to a prompt, as far as it has been generated."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def extend(self, delta: CompletionOutput) -> None:
        """Append newly generated text and tokens."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = self.stop_reason if delta.stop_reason is None else delta.stop_reason

    def whole(self) -> CompletionOutput:
        """Return the answer as one output."""
        return CompletionOutput(self.index, self.text, tuple(self.token_ids), finish_reason=self.finish_reason)

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability per token, by which `best_of` ranks answers."""
        sampled = [next(iter(step.values())).logprob for step in self.logprobs]
        return sum(sampled) / max(len(sampled), 1)


@dataclass
class Usage:
    """Token counts of one HTTP request."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)  # by index of the prompt

    def add(self, delta: Delta) -> None:
        """Count newly generated tokens, and prompt tokens found in the prefix cache."""
        prompt, output = delta
        self.completion_tokens += sum(len(answer.token_ids) for answer in output.outputs)
        self.cached_tokens[prompt] = max(self.cached_tokens.get(prompt, 0), output.num_cached_tokens)

    def as_dict(self) -> dict[str, object]:
        """Return OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens.values())},
        }


@dataclass(frozen=True)
class PromptResult:
    """All answers to one prompt, and its last output, which holds the log-probabilities of the prompt itself."""

    prompt: int  # index
    answers: list[GeneratedAnswer]
    last: RequestOutput

    @property
    def size(self) -> int:
        """Number of tokens and log-probabilities, which the time to write the result as JSON depends on."""
        steps = [step for answer in self.answers for step in answer.logprobs]
        steps += [step for step in self.last.prompt_logprobs or () if step is not None]
        tokens = len(self.last.prompt_token_ids) + sum(len(answer.token_ids) for answer in self.answers)
        return tokens + sum(map(len, steps))


@dataclass(frozen=True)
class Job:
    """The work of the engine for one HTTP request: prompts with their sampling parameters.

    `sender`: the client for whom the engine compiles grammars, in turns with others. `names` returns a context in which
    errors get the client's names of fields.
    """

    id: str
    prompts: Sequence[TokensPrompt]
    params: Sequence[SamplingParams]  # per prompt: they differ in max_tokens
    priority: int = 0
    salt: str = ""
    trace: TraceContext | None = None
    sender: str = ""
    names: Names = contextlib.nullcontext

    def usage(self) -> Usage:
        """Return the token counts before anything has been generated."""
        return Usage(prompt_tokens=sum(len(prompt.token_ids) for prompt in self.prompts))

    async def run(self, client: EngineClient, *, stream: bool = True) -> AsyncGenerator[Delta, None]:
        """Yield the outputs of all prompts as they arrive, or without `stream` only when an answer ends.

        Closing the generator aborts all prompts. An error of one prompt ends all of them. Prompts that exceed the
        queue's limits together run in several batches.
        """
        with self.names():
            async with contextlib.aclosing(self._run(client, stream=stream)) as deltas:
                async for delta in deltas:
                    yield delta

    async def _run(self, client: EngineClient, *, stream: bool) -> AsyncGenerator[Delta, None]:
        options = {"priority": self.priority, "salt": self.salt, "trace": self.trace, "sender": self.sender}
        generate = partial(client.generate, stream=stream, **options)
        if len(self.prompts) == 1:
            async with contextlib.aclosing(generate(self.prompts[0], self.params[0], request_id=self.id)) as outputs:
                async for output in outputs:
                    yield 0, output
            return
        for batch in queue_batches(client.info, self.prompts, self.params[0].n):
            streams = {i: generate(self.prompts[i], self.params[i], request_id=f"{self.id}-{i}") for i in batch}
            async with contextlib.aclosing(_merge(streams)) as merged:
                async for delta in merged:
                    yield delta

    async def results(self, client: EngineClient, usage: Usage) -> AsyncGenerator[PromptResult, None]:
        """Run all prompts to the end, yield each prompt's result when it is complete, and count its tokens in `usage`.

        An error of one prompt ends all of them.
        """
        answers = {i: [GeneratedAnswer(k) for k in range(params.n)] for i, params in enumerate(self.params)}
        async with contextlib.aclosing(self.run(client, stream=False)) as deltas:
            async for delta in deltas:
                prompt, output = delta
                usage.add(delta)
                for answer in output.outputs:
                    answers[prompt][answer.index].extend(answer)
                if output.finished:
                    yield PromptResult(prompt, answers.pop(prompt), output)


@dataclass
class GenerationResponse(ABC, Generic[BodyT]):
    """The JSON objects that answer one generation request, whole or as a stream.

    `id`, `model` and `created` are repeated in every object.
    """

    object_type: ClassVar[str]
    chunk_type: ClassVar[str]

    client: EngineClient
    job: Job
    body: BodyT
    model: str
    created: int  # seconds since the epoch

    _prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)  # by index of the prompt, in a stream
    _begun: set[tuple[int, int]] = field(default_factory=set)  # prompts and answers of which events have been sent

    async def whole(self) -> bytes:
        """Generate everything and return the JSON response of a request that does not stream.

        The choices of a prompt are written when they are complete, since objects take ten times the memory of JSON.
        Large ones are written off the event loop.
        """
        usage, size = self.job.usage(), 0
        response = self._object(self.object_type, [])
        choices: dict[int, bytes] = {}
        async with contextlib.aclosing(self.job.results(self.client, usage)) as results:
            async for result in results:
                choices[result.prompt], fields = await off_loop_if_large(result.size, self._write, result)
                response |= fields
                size += result.size
        response["usage"] = self._usage(usage)
        parts = [choices[prompt] for prompt in sorted(choices)]
        return await off_loop_if_large(size, with_entries, response, "choices", parts)

    def _write(self, result: PromptResult) -> tuple[bytes, dict[str, Any]]:
        return b",".join(map(to_json, self._final_choices(result))), self._final_fields(result)

    @abstractmethod
    def _final_choices(self, result: PromptResult) -> list[dict[str, Any]]:
        """Return the choices of a response for one prompt. Called in another thread if the result is large."""

    def _final_fields(self, result: PromptResult) -> dict[str, Any]:
        """Return further fields of a response. Called in another thread if the result is large."""
        return {}

    def _usage(self, usage: Usage) -> dict[str, object]:
        return usage.as_dict()

    async def events(self) -> AsyncGenerator[dict[str, Any] | bytes, None]:
        """Yield the JSON value of each event of a stream, and last the usage if the client asked for it.

        The first events of an answer may hold its whole prompt. Large ones are written off the event loop, as bytes.
        """
        usage = self.job.usage()
        async with contextlib.aclosing(self.job.run(self.client)) as deltas:
            async for prompt, output in deltas:
                usage.add((prompt, output))
                if output.prompt_logprobs is not None:
                    self._prompt_logprobs[prompt] = output.prompt_logprobs
                for answer in output.outputs:
                    if self._begin(prompt, answer) > MAX_INLINE_SIZE:
                        for written in await off_loop(self._write_chunks, prompt, answer, usage):
                            yield written
                    else:
                        for chunk in self._chunks(prompt, answer):
                            yield self._with_usage(chunk, usage)
        if self.body.usage_at_end:
            yield {**self._object(self.chunk_type, []), "usage": self._usage(usage)}

    def _begin(self, prompt: int, answer: CompletionOutput) -> int:
        """Return roughly the number of the prompt's log-probabilities in the next events: 0 if it is not their first.

        Mark the answer as begun.
        """
        steps = self._prompt_logprobs.get(prompt)
        if steps is None or (prompt, answer.index) in self._begun:
            return 0
        self._begun.add((prompt, answer.index))
        return len(steps) * len(steps[-1] or ())

    def _write_chunks(self, prompt: int, answer: CompletionOutput, usage: Usage) -> list[bytes]:
        return [to_json(self._with_usage(chunk, usage)) for chunk in self._chunks(prompt, answer)]

    @abstractmethod
    def _chunks(self, prompt: int, answer: CompletionOutput) -> Iterator[dict[str, Any]]:
        """Yield the stream's objects for new output of one answer to the prompt with index `prompt`."""

    def _with_usage(self, chunk: dict[str, Any], usage: Usage) -> dict[str, Any]:
        if self.body.usage_at_end:
            chunk["usage"] = self._usage(usage) if self.body.usage_always else None
        return chunk

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.job.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def with_entries(response: dict[str, Any], name: str, entries: Sequence[bytes]) -> bytes:
    """Return a response as JSON, in which the empty list `name` gets entries that are JSON already."""
    before, after = to_json(response).split(b'"%s":[]' % name.encode(), 1)
    return b"".join((before, b'"%s":[' % name.encode(), b",".join(entries), b"]", after))


def queue_batches(info: ModelInfo, prompts: Sequence[TokensPrompt], n: int = 1) -> Iterator[range]:
    """Yield ranges of consecutive prompts, with n answers each, that fit an empty queue: usually just one range."""
    start = tokens = 0
    for i, prompt in enumerate(prompts):
        size = len(prompt.token_ids) * n
        full = (i - start + 1) * n > info.max_queued_requests or tokens + size > info.max_queued_tokens
        if full and i > start:
            yield range(start, i)
            start, tokens = i, 0
        tokens += size
    yield range(start, len(prompts))


async def _merge(streams: Mapping[int, AsyncGenerator[RequestOutput, None]]) -> AsyncGenerator[Delta, None]:
    """Yield the outputs of several streams, keyed by prompt index, in the order in which they arrive."""
    queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()

    async def pump(prompt: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for output in stream:
                    queue.put_nowait((prompt, output))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in streams.items()]
    try:
        for _ in tasks:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
