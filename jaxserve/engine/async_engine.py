"""The asynchronous engine: an `EngineClient` whose instances each step in a thread of their own."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager

from jaxserve.core.clock import Clock
from jaxserve.core.errors import EngineStopped, NoTokenizer
from jaxserve.core.request import Request, RequestOutput, TraceContext
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.structured import GrammarCompiler
from jaxserve.engine.client import ControlClient, InstanceState, ModelInfo, Prompt, TextPrompt
from jaxserve.engine.directory import Directory, RouteOf
from jaxserve.engine.instance_thread import Stream
from jaxserve.engine.instance_threads import InstanceThreads
from jaxserve.engine.limits import grammar_in_turn
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.outputs import RequestState
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.telemetry import EngineMetrics, HttpFigures, Snapshot, WaitingRoom

LONG_TEXT = 20_000  # characters; longer prompts are tokenized in a thread


class AsyncEngine:
    """The engine for servers and asyncio programs. `EngineClient` and `InstanceSet` describe its methods."""

    def __init__(
        self,
        instances: Mapping[str, StepLoop],
        info: ModelInfo,
        tokenizer: Tokenizer | None,
        metrics: EngineMetrics,
        clock: Clock,
        *,
        grammars: GrammarCompiler | None = None,
        control: ControlClient | None = None,
        route: RouteOf | None = None,
        max_model_len: Callable[[], int] | None = None,
        on_close: Callable[[], None] = lambda: None,
    ):
        """`control`: the control plane, None for a plan that never changes.

        `route` and `max_model_len` say what instances hold now and at best, as for `Directory`. `on_close` runs once,
        after the loops have ended, and frees the device.
        """
        self.metrics = metrics
        self.control = control
        self._tokenizer = tokenizer
        self._clock = clock
        self._grammars = grammars
        self._ids = itertools.count()
        self._on_close = on_close
        self._before_close: list[Callable[[], None]] = []
        self._draining = False
        self._closed = False
        self._directory: Directory[Stream] = Directory(
            info,
            tokenizer,
            clock,
            instances,
            route=route,
            max_model_len=max_model_len,
            rejected=metrics.rejected,
        )
        self._instances = InstanceThreads(instances, self._directory, clock)
        metrics.follow_waiting_room(self.waiting_room)

    @property
    def info(self) -> ModelInfo:
        return self._directory.info

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise NoTokenizer
        return self._tokenizer

    @property
    def ready(self) -> bool:
        return not self._draining and not self._closed and self._instances.ready

    # -- requests

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
        """Yield the new parts of a request's answers, as `EngineClient.generate`."""
        request = await self._request(prompt, params, request_id, priority, salt, trace, sender, stream=stream)
        async with self._admitted(request) as answers:
            while True:
                output = await answers.next()
                yield output
                if output.finished:
                    return

    async def embed(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: str = "",
        trace: TraceContext | None = None,
    ) -> RequestOutput:
        """Return an output with the pooled last hidden state, as `EngineClient.embed`."""
        params = SamplingParams(max_tokens=1, detokenize=False)
        request = await self._request(prompt, params, request_id, priority, salt, trace, embed=True)
        async with self._admitted(request) as stream:
            return await stream.next()

    # -- what can be observed

    def instances(self) -> list[InstanceState]:
        cores = {name: steps.core for name, steps in self.loops.items()}
        return [InstanceState(name, core.metrics.number, core.snapshot) for name, core in cores.items()]

    def snapshots(self) -> dict[str, Snapshot]:
        """Return the state of each instance by its name."""
        return self._instances.snapshots()

    def snapshot(self) -> Snapshot:
        return self._instances.snapshot()

    def waiting_room(self) -> WaitingRoom:
        return self._directory.waiting_room()

    def check_health(self) -> None:
        self._instances.check_health()

    def reset_prefix_cache(self) -> None:
        for steps in self.loops.values():
            steps.call(steps.core.reset_prefix_cache)

    def count_rejection(self, reason: str) -> None:
        self.metrics.rejected(reason)

    def outcomes(self) -> Mapping[str, Mapping[str, int]]:
        return self.metrics.outcomes()

    def metrics_text(self, http: HttpFigures | None = None, *, openmetrics: bool = False) -> bytes:
        return self.metrics.render(http, openmetrics=openmetrics)

    # -- the end

    @property
    def draining(self) -> bool:
        """True if new requests are refused."""
        return self._draining

    def call_before_close(self, function: Callable[[], None]) -> None:
        """Call a function once, after the loops have ended and before the device is freed."""
        self._before_close.append(function)

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests, and return whether those in flight end within `timeout` seconds.

        Requests that no instance can hold now end with `EngineStopped`.
        """
        self._draining = True
        self._instances.refuse()
        end = self._clock.now() + timeout
        while self._instances.busy:
            if self._clock.now() >= end:
                return False
            await asyncio.sleep(0.02)
        return True

    async def shutdown(self) -> None:
        """End requests and threads, and free the device. Idempotent."""
        if self._closed:
            return
        self._draining = self._closed = True
        await asyncio.to_thread(self._instances.close)
        for function in self._before_close:
            await asyncio.to_thread(function)
        self._on_close()

    # -- instances that come and go, as `InstanceSet`

    @property
    def loops(self) -> Mapping[str, StepLoop]:
        return self._instances.loops

    def stopped(self, names: Collection[str]) -> AbstractContextManager[None]:
        return self._instances.stopped(names)

    def replace(
        self, before: Collection[str], after: Mapping[str, StepLoop], homeless: Iterable[RequestState] = ()
    ) -> None:
        self._instances.replace(before, after, homeless)

    @property
    def failed(self) -> Mapping[str, BaseException]:
        return self._instances.failed

    def give_up(self, name: str) -> None:
        self._instances.give_up(name)

    def recover_by(self, can_recover: Callable[[str], bool]) -> None:
        self._instances.recover_by(can_recover)

    def place(self, states: Iterable[RequestState]) -> None:
        self._instances.place(states)

    def reroute(self) -> None:
        self._instances.reroute()

    # -- the way of a request

    async def _request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        salt: str,
        trace: TraceContext | None,
        sender: str = "",
        *,
        embed: bool = False,
        stream: bool = True,
    ) -> Request:
        arrival = self._clock.now()
        if isinstance(prompt, TextPrompt):
            token_ids = await self._encode(prompt)
        else:
            token_ids = prompt.token_ids
        return Request(
            id=request_id or f"request-{next(self._ids)}",
            prompt_token_ids=token_ids,
            params=params,
            arrival=arrival,
            prompt=prompt.text,
            priority=priority,
            salt=salt,
            embed=embed,
            stream=stream,
            grammar=await grammar_in_turn(params, self._grammars, sender),
            trace=trace,
        )

    async def _encode(self, prompt: TextPrompt) -> tuple[int, ...]:
        encode = self.tokenizer.encode
        if len(prompt.text) > LONG_TEXT:
            return tuple(await asyncio.to_thread(encode, prompt.text, prompt.add_special_tokens))
        return tuple(encode(prompt.text, prompt.add_special_tokens))

    @asynccontextmanager
    async def _admitted(self, request: Request) -> AsyncGenerator[Stream, None]:
        """Yield the stream of a request that the least loaded instance accepts. Leaving early aborts the request."""
        if self._draining or self._closed:
            raise EngineStopped("the engine is shutting down and takes no new requests")
        stream = Stream.new()
        while (before := self._directory.get(request.id)) is not None and before.aborted:
            await asyncio.sleep(0.001)  # its id is free after the present step
        entry = self._instances.add(request, stream)
        try:
            await stream.admitted
            yield stream
        finally:
            self._instances.abort(entry)
