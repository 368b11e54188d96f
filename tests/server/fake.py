"""A deterministic fake engine for tests of the HTTP protocol: scripted text, a limited queue, faults on demand."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer as HfTokenizer, decoders, models, pre_tokenizers

from jaxserve.core.errors import EngineFailed, EngineStopped, QueueFull
from jaxserve.core.request import CompletionOutput, Logprob, RequestOutput, TokenLogprobs, TraceContext
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.client import ControlClient, InstanceState, ModelInfo, Prompt, TokensPrompt
from jaxserve.engine.limits import check_params, check_prompt
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.telemetry import EngineMetrics, HttpFigures, Snapshot, WaitingRoom

END = "<|end|>"


def byte_tokenizer(chat_template: str | None = None) -> Tokenizer:
    """Return a tokenizer with one token per byte and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = HfTokenizer(models.BPE({character: id for id, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return Tokenizer(tokenizer, special_tokens={"eos_token": END}, chat_template=chat_template)


@dataclass(eq=False)
class FakeClient:
    """An EngineClient that answers every prompt with `script`, one token per turn of the event loop.

    Answer i of n starts i characters later in the script, so that answers differ.
    - `gate`: if given, no token is generated before it is set
    - `delay`: seconds before each token from index `delay_after` on
    - `fail_after`: number of tokens after which `failure` is raised
    """

    script: str = "Hello, wörld! 🦊"
    capacity: int = 64
    max_model_len: int = 512
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_000_000
    gate: asyncio.Event | None = None
    delay: float = 0.0
    delay_after: int = 0
    fail_after: int | None = None
    failure: Exception = field(default_factory=lambda: EngineFailed("a step raised"))
    tokenizer: Tokenizer = field(default_factory=byte_tokenizer)
    healthy: bool = True
    default_sampling: dict = field(default_factory=dict)
    control: ControlClient | None = None

    def __post_init__(self) -> None:
        self.info = ModelInfo(
            name="fake",
            max_model_len=self.max_model_len,
            vocab_size=self.tokenizer.vocab_size,
            hidden_size=4,
            created=1,
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            default_sampling=self.default_sampling,
        )
        self.active: set[str] = set()
        self.aborted: list[str] = []
        self.resets = 0  # of the prefix cache
        self.seen: list[tuple[TokensPrompt, SamplingParams, int, str]] = []
        self.draining = self.stopped = False
        self._stop = asyncio.Event()
        self._ids = itertools.count()
        self._metrics = EngineMetrics("fake")
        self._metrics.instance().follow(self.snapshot)

    @property
    def ready(self) -> bool:
        return not self.draining and not self.stopped

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: str = "",
        stream: bool = True,
        trace: TraceContext | None = None,
        sender: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        assert isinstance(prompt, TokensPrompt)
        request_id = self._admit(prompt, request_id, generates=params.max_tokens != 0)
        check_params(self.info, params, len(prompt.token_ids))
        self.seen.append((prompt, params, priority, salt))
        done = False
        try:
            async for output in self._steps(prompt, params, request_id, stream=stream):
                done = output.finished
                yield output
        finally:
            self.active.discard(request_id)
            if not done:
                self.aborted.append(request_id)

    async def embed(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: str = "",
        trace: TraceContext | None = None,
    ) -> RequestOutput:
        assert isinstance(prompt, TokensPrompt)
        request_id = self._admit(prompt, request_id, generates=False)
        try:
            await self._turn(0)
            values = np.array([len(prompt.token_ids), 1, -0.5, 0.25], np.float32)
            return RequestOutput(request_id, None, prompt.token_ids, (), True, embedding=values)
        finally:
            self.active.discard(request_id)

    def instances(self) -> list[InstanceState]:
        return [InstanceState("0", 0, self.snapshot())]

    def waiting_room(self) -> WaitingRoom:
        return WaitingRoom()

    def snapshot(self) -> Snapshot:
        return Snapshot(num_running=len(self.active), kv_pages_total=100, kv_pages_used=len(self.active))

    def check_health(self) -> None:
        if not self.healthy:
            raise EngineFailed("no step has ended for 120 s although there is work")

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def count_rejection(self, reason: str) -> None:
        self._metrics.rejected(reason)

    def outcomes(self) -> Mapping[str, Mapping[str, int]]:
        return self._metrics.outcomes()

    def metrics_text(self, http: HttpFigures | None = None, *, openmetrics: bool = False) -> bytes:
        return self._metrics.render(http, openmetrics=openmetrics)

    async def drain(self, timeout: float) -> bool:
        self.draining = True
        try:
            async with asyncio.timeout(timeout):
                while self.active:
                    await asyncio.sleep(0.005)
        except TimeoutError:
            return False
        return True

    async def shutdown(self) -> None:
        self.stopped = True
        self._stop.set()
        if self.gate is not None:
            self.gate.set()

    def _admit(self, prompt: TokensPrompt, request_id: str | None, *, generates: bool = True) -> str:
        if not self.ready:
            raise EngineStopped("the engine takes no new requests")
        check_prompt(self.info, prompt.token_ids, generates=generates)
        if len(self.active) >= self.capacity:
            raise QueueFull("the queue is full", retry_after=2.5, field="max_queued_requests", limit=self.capacity)
        request_id = request_id or f"request-{next(self._ids)}"
        assert request_id not in self.active
        self.active.add(request_id)
        return request_id

    async def _turn(self, count: int) -> None:
        delay = self.delay if count >= self.delay_after else 0
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), delay) if delay else await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if self.stopped:
            raise EngineStopped("the engine has stopped")
        if self.fail_after is not None and count >= self.fail_after:
            raise self.failure

    async def _steps(
        self, prompt: TokensPrompt, params: SamplingParams, request_id: str, *, stream: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        scripts = [self.tokenizer.encode(self.script[i % 7 :]) for i in range(params.n)]
        streams = [self.tokenizer.stream(after=prompt.token_ids) for _ in range(params.n)]
        room = self.info.max_model_len - len(prompt.token_ids)
        limit = room if params.max_tokens is None else params.max_tokens
        longest = min(max(map(len, scripts)), limit)
        asked = None
        if params.prompt_logprobs is not None:
            asked = (None, *(self._logprobs(token, params.prompt_logprobs) for token in prompt.token_ids[1:]))
        if longest == 0:
            await self._turn(0)
            none = None if params.logprobs is None else ()
            ended = tuple(CompletionOutput(i, "", (), logprobs=none, finish_reason="length") for i in range(params.n))
            yield RequestOutput(request_id, prompt.text, prompt.token_ids, ended, True, prompt_logprobs=asked)
        for step in range(longest):
            await self._turn(step)
            outputs = []
            for index, script in enumerate(scripts):
                last = min(len(script), limit) - 1
                if step > last:
                    continue
                text = streams[index].push([script[step]])
                reason = None
                if step == last:
                    text += streams[index].flush()
                    reason = "length" if step == limit - 1 else "stop"
                logprobs = None if params.logprobs is None else (self._logprobs(script[step], params.logprobs),)
                outputs.append(CompletionOutput(index, text, (script[step],), logprobs=logprobs, finish_reason=reason))
            yield RequestOutput(
                request_id,
                prompt.text,
                prompt.token_ids,
                tuple(outputs),
                finished=step == longest - 1,
                prompt_logprobs=asked if step == (0 if stream else longest - 1) else None,
                num_cached_tokens=1,
            )

    def _logprobs(self, token: int, alternatives: int) -> TokenLogprobs:
        """Return log-probabilities: the token itself is the likeliest, and ids after it follow by rank."""
        found = {token: Logprob(-0.5 if token % 2 else -1.0, 1)}
        for rank in range(2, alternatives + 1):
            other = (token + rank - 1) % self.info.vocab_size
            found[other] = Logprob(float("-inf") if rank > 3 else -float(rank), rank)
        return found
