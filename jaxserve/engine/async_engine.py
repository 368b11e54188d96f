"""The asynchronous engine: an `EngineClient` whose instances each step in a thread of their own."""

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

from jaxserve.core.clock import Clock
from jaxserve.core.errors import EngineFailed, EngineStopped, NoTokenizer
from jaxserve.core.request import Request, RequestOutput, TraceContext
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.structured import GrammarCompiler
from jaxserve.engine.client import ControlClient, InstanceState, ModelInfo, Prompt, TextPrompt
from jaxserve.engine.directory import Directory, RouteOf
from jaxserve.engine.instance_thread import InstanceThread, Stop, Stream, StreamEntry, fail
from jaxserve.engine.instances import STALL_SECONDS, lost_request, show_metrics
from jaxserve.engine.limits import grammar_of
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.outputs import RequestState
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.telemetry import EngineMetrics, Snapshot, WaitingRoom, combine

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
        self._changing = threading.Lock()  # held while instances are stopped
        self._stops: dict[str, Stop] = {}  # by instance, while `stopped` is in progress
        # Never changed, but replaced while the directory's lock is held.
        self._threads = {name: InstanceThread(name, steps, self._directory, self) for name, steps in instances.items()}
        metrics.follow_waiting_room(self.waiting_room)
        for thread in self._threads.values():
            thread.start()

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
        if self._draining or self._closed:
            return False
        return all(not t.started or (t.alive and t.failure is None) for t in self._threads.values())

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
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the new parts of a request's answers, as `EngineClient.generate`."""
        request = await self._request(prompt, params, request_id, priority, salt, trace, stream=stream)
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
        return [
            InstanceState(name, thread.steps.core.metrics.number, thread.steps.core.snapshot)
            for name, thread in self._threads.items()
        ]

    def snapshots(self) -> dict[str, Snapshot]:
        """Return the state of each instance by its name."""
        return {name: thread.steps.core.snapshot for name, thread in self._threads.items()}

    def snapshot(self) -> Snapshot:
        return combine(list(self.snapshots().values()))

    def waiting_room(self) -> WaitingRoom:
        return self._directory.waiting_room()

    def check_health(self) -> None:
        """Raise `EngineFailed` if a loop has died, or has work and makes no progress."""
        now = self._clock.now()
        for thread in self._threads.values():
            if thread.failure is not None or (thread.started and not thread.alive and not self._closed):
                raise EngineFailed(f"the engine loop has ended: {thread.failure!r}")
            if thread.started and not thread.steps.idle and now - thread.progress > STALL_SECONDS:
                raise EngineFailed(f"no step has ended for {now - thread.progress:.0f} s although there is work")

    def count_rejection(self, reason: str) -> None:
        self.metrics.rejected(reason)

    def metrics_text(self) -> bytes:
        return self.metrics.render()

    # -- the end

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests, and return whether those in flight end within `timeout` seconds.

        Requests that no instance can hold now end with `EngineStopped`.
        """
        self._draining = True
        self._send_waiting()
        end = self._clock.now() + timeout
        while any(
            t.alive and t.failure is None and (self._directory.on(name) or not t.steps.idle)
            for name, t in self._threads.items()
        ):
            if self._clock.now() >= end:
                return False
            await asyncio.sleep(0.02)
        return True

    async def shutdown(self) -> None:
        """End requests and threads, and free the device. Idempotent."""
        if self._closed:
            return
        self._draining = self._closed = True
        self._send_waiting()
        for thread in self._threads.values():
            thread.stop()
        await asyncio.to_thread(self._join)
        self._on_close()

    def _join(self) -> None:
        with self._changing:  # then all threads have been started
            for thread in self._threads.values():
                thread.stop()
                thread.join()

    # -- instances that come and go

    @property
    def loops(self) -> Mapping[str, StepLoop]:
        return {name: thread.steps for name, thread in self._threads.items()}

    @contextmanager
    def stopped(self, names: Collection[str]) -> Iterator[None]:
        with self._changing:
            threads = [self._threads[name] for name in names]
            stops = [thread.halt() for thread in threads]
            self._stops = {stop.thread.name: stop for stop in stops}
            try:
                for stop in stops:
                    stop.wait(STALL_SECONDS)
                yield
            finally:
                self._stops = {}
                for stop in stops:
                    stop.over.set()
                for thread in self._threads.values():
                    thread.start()
                self.reroute()

    def replace(self, before: Collection[str], after: Mapping[str, StepLoop]) -> None:
        ending = [self._threads[name] for name in before]
        assert all(thread.name in self._stops or not thread.started for thread in ending), "only stopped ones can end"
        with self._directory.lock:
            new = {name: InstanceThread(name, steps, self._directory, self) for name, steps in after.items()}
            threads = {name: thread for name, thread in self._threads.items() if name not in before} | new
            known = [name for name in (*self._stops, *after) if name in threads]
            ids = {name: tuple(threads[name].steps.core.request_ids) for name in known}
            on_the_way, lost = self._directory.moved(threads, ids)
            self._threads = threads
            for entry in on_the_way:
                self._directory.send_again(entry)
                self._send(entry)
            for entry in lost:
                self._end(entry, lost_request(entry.request))
        for thread in ending:
            thread.retire()
            if stop := self._stops.pop(thread.name, None):
                stop.over.set()
        for thread in ending:
            thread.join()
        show_metrics([thread.steps for thread in ending], after.values())

    def place(self, states: Iterable[RequestState], *, outgrown: bool = False) -> None:
        with self._directory.lock:
            for state in states:
                self._directory.leave(state, outgrown=outgrown)
            self._send_waiting()

    def reroute(self) -> None:
        with self._directory.lock:
            self._directory.follow(self._threads)
            self._send_waiting()

    # -- the way of a request

    def abort(self, entry: StreamEntry) -> None:
        """End a request, wherever it is. No effect on one that has ended."""
        with self._directory.lock:
            if self._directory.get(entry.request.id) is not entry:
                return
            entry.aborted = True
            if entry.instance is None:
                self._directory.end(entry)
            else:
                self._threads[entry.instance].abort(entry)

    def _send(self, entry: StreamEntry) -> None:
        """Send a request to its instance, or accept one that waits. Call with the directory's lock."""
        if entry.instance is not None:
            self._threads[entry.instance].submit(entry)
        else:
            entry.owner.settle()

    def _send_waiting(self) -> None:
        """Send the waiting requests that an instance can hold now there, and end those that none will ever hold."""
        with self._directory.lock:
            found, hopeless = self._directory.take_waiting()
            for entry in found:
                self._send(entry)
            for entry, item in hopeless:
                self._end(entry, item)
            if self._draining:
                for entry in self._directory.on(None):
                    self._end(entry, EngineStopped("the engine is shutting down"))

    def _end(self, entry: StreamEntry, item: RequestOutput | BaseException) -> None:
        self._directory.end(entry)
        if isinstance(item, BaseException):
            fail(entry, item)
        else:
            entry.owner.put(item)

    async def _request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        salt: str,
        trace: TraceContext | None,
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
            grammar=await asyncio.to_thread(grammar_of, params, self._grammars) if params.constrained else None,
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
        with self._directory.lock:
            entry = self._directory.add(request, stream)
            self._send(entry)
        try:
            await stream.admitted
            yield stream
        finally:
            self.abort(entry)
