"""Running a request's prompts side by side, and putting the deltas of their answers together."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from jaxserve.core.request import CompletionOutput, RequestOutput, TokenLogprobs
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.client import EngineClient, ModelInfo, TokensPrompt

Delta = tuple[int, RequestOutput]  # which prompt, and what is new for it


@dataclass
class Answer:
    """One answer in the making. Mutated by `extend`."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def extend(self, delta: CompletionOutput) -> None:
        """Mutates: appends what is new."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = self.stop_reason if delta.stop_reason is None else delta.stop_reason

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability per token, by which best_of ranks."""
        chosen = [next(iter(step.values())).logprob for step in self.logprobs]
        return sum(chosen) / max(len(chosen), 1)


@dataclass
class Usage:
    """Tokens of a request. Mutated by `add`."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)  # by prompt

    def add(self, delta: Delta) -> None:
        """Mutates: counts what is new."""
        prompt, output = delta
        self.completion_tokens += sum(len(answer.token_ids) for answer in output.outputs)
        self.cached[prompt] = max(self.cached.get(prompt, 0), output.num_cached_tokens)

    def as_dict(self) -> dict[str, object]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


@dataclass(frozen=True)
class Job:
    """What one HTTP request asks of the engine: prompts with their parameters."""

    id: str
    prompts: Sequence[TokensPrompt]
    params: Sequence[SamplingParams]  # per prompt: they differ in max_tokens
    priority: int = 0
    salt: str = ""

    def usage(self) -> Usage:
        """The usage before anything was generated."""
        return Usage(prompt_tokens=sum(len(prompt.token_ids) for prompt in self.prompts))

    async def run(self, client: EngineClient, *, stream: bool = True) -> AsyncGenerator[Delta, None]:
        """Deltas of all prompts as they come, or (not `stream`) at the ends of their answers. Closing the generator
        aborts them all; one's error ends them all. Prompts that the queue can never hold at once run in batches.
        """
        generate = partial(client.generate, priority=self.priority, salt=self.salt, stream=stream)
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

    async def collect(self, client: EngineClient) -> tuple[list[list[Answer]], list[RequestOutput], Usage]:
        """Runs to the end: answers by prompt, each prompt's last output (it has the prompt's logprobs), and usage."""
        answers = [[Answer(i) for i in range(params.n)] for params in self.params]
        last: dict[int, RequestOutput] = {}
        usage = self.usage()
        async with contextlib.aclosing(self.run(client, stream=False)) as deltas:
            async for delta in deltas:
                prompt, output = delta
                usage.add(delta)
                last[prompt] = output
                for answer in output.outputs:
                    answers[prompt][answer.index].extend(answer)
        return answers, [last[i] for i in range(len(self.prompts))], usage


def queue_batches(info: ModelInfo, prompts: Sequence[TokensPrompt], n: int = 1) -> Iterator[range]:
    """Yield ranges of consecutive prompts that an empty queue takes at once, with n answers each; mostly just one."""
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
    """The deltas of several prompts, whose streams are given by their numbers, as they come."""
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
