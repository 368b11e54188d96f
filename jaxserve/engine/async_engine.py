"""The asynchronous engine: an `EngineClient` whose instances each step in a thread of their own."""

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from jaxserve.core.clock import Clock
from jaxserve.core.errors import EngineFailed, EngineForked, EngineStopped, NoTokenizer
from jaxserve.core.request import Request, RequestOutput, TraceContext
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.structured import GrammarCompiler
from jaxserve.engine.client import ControlClient, ModelInfo, Prompt, TextPrompt
from jaxserve.engine.limits import grammar_of
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.scheduler.routing import LeastLoaded
from jaxserve.telemetry import EngineMetrics, Snapshot, combine

log = logging.getLogger(__name__)

STALL_SECONDS = 120.0  # an engine with work but without a finished step for this long is unhealthy
LONG_TEXT = 20_000  # characters; longer prompts are tokenized in a thread

Item = RequestOutput | BaseException


@dataclass(eq=False)
class Stream:
    """A queue of one request's outputs for the asyncio loop that sent the request."""

    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[Item]
    admitted: asyncio.Future[None]

    async def next(self) -> RequestOutput:
        """Return the next output, or raise the error that ended the request early."""
        item = await self.items.get()
        error = item if isinstance(item, BaseException) else item.error
        if error is not None:
            raise error
        assert isinstance(item, RequestOutput)
        return item


class InstanceThread:
    """A thread that steps one instance, takes commands between steps, and sends outputs back once per step."""

    def __init__(self, steps: StepLoop, name: str):
        self.steps = steps
        self.failure: BaseException | None = None
        self.streams: dict[str, Stream] = {}  # by request id; changed by this thread only
        self.progress = steps.clock.now()  # time at which the latest step ended, or the thread was last idle
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._over = False  # set before the thread takes its commands for the last time
        steps.wake = lambda: self._commands.put(lambda: None)  # wakes a thread that waits for commands
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True if the thread runs."""
        return self._thread.is_alive()

    def submit(self, request: Request, stream: Stream) -> None:
        """Queue a request. `stream.admitted` completes when it is accepted or refused. Call from any thread."""
        self._commands.put(lambda: self._add(request, stream))
        if self._over or not self.alive:
            self._send(stream, stream.admitted, self._end_error() if self._over else EngineForked())

    def abort(self, request_id: str, stream: Stream) -> None:
        """End the request of a stream before the next step, if it is still in flight. Call from any thread."""
        self._commands.put(lambda: self._abort(request_id, stream))

    def stop(self) -> None:
        """End the thread after the present step, and requests in flight with `EngineStopped`. Call from any thread."""
        self._commands.put(self._stop)

    def join(self) -> None:
        """Wait for the thread to end."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                if not self._stopping:
                    self._deliver(self.steps.step())
                    self.progress = self.steps.clock.now()
        except BaseException as error:
            log.exception("the engine loop failed")
            self.failure = error
        self._over = True
        for request_id, stream in self.streams.items():
            self._put(stream, self._end_error())
            if self.failure is None:  # give back the pages of an intact core
                self.steps.core.abort(request_id, now=self.steps.clock.now())
        self._take_commands()

    def _end_error(self) -> BaseException:
        if self.failure is not None:
            return EngineFailed(f"the engine failed: {type(self.failure).__name__}: {self.failure}")
        return EngineStopped("the engine has stopped")

    def _take_commands(self) -> None:
        """Run the waiting commands, or wait for one if the engine is idle."""
        block = self.steps.idle and not self._stopping and self.failure is None
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return
            command()
            self.progress = self.steps.clock.now() if block else self.progress
            block = False

    def _stop(self) -> None:
        self._stopping = True

    def _add(self, request: Request, stream: Stream) -> None:
        if self._stopping or self.failure is not None:
            self._send(stream, stream.admitted, self._end_error())
            return
        try:
            self.steps.add(request)
        except Exception as error:
            self._send(stream, stream.admitted, error)
        else:
            self.streams[request.id] = stream
            self._send(stream, stream.admitted, None)

    def _abort(self, request_id: str, stream: Stream) -> None:
        if self.streams.get(request_id) is stream:  # else this one was refused, because the id was in use
            del self.streams[request_id]
            self.steps.core.abort(request_id, now=self.steps.clock.now())

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        batches: dict[asyncio.AbstractEventLoop, list[tuple[Stream, RequestOutput]]] = {}
        for output in outputs:
            stream = self.streams.pop(output.request_id) if output.finished else self.streams[output.request_id]
            batches.setdefault(stream.loop, []).append((stream, output))
        for loop, batch in batches.items():
            _call_soon(loop, partial(_put_all, batch))

    def _put(self, stream: Stream, item: Item) -> None:
        _call_soon(stream.loop, lambda: stream.items.put_nowait(item))

    @staticmethod
    def _send(stream: Stream, future: asyncio.Future[None], error: BaseException | None) -> None:
        def settle() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        _call_soon(stream.loop, settle)


def _put_all(batch: list[tuple[Stream, RequestOutput]]) -> None:
    for stream, output in batch:
        stream.items.put_nowait(output)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        log.debug("a client's event loop was closed before its request ended")


class AsyncEngine:
    """The engine for servers and asyncio programs. `EngineClient` describes its methods."""

    def __init__(
        self,
        instances: Sequence[StepLoop],
        info: ModelInfo,
        tokenizer: Tokenizer | None,
        metrics: EngineMetrics,
        clock: Clock,
        *,
        grammars: GrammarCompiler | None = None,
        control: ControlClient | None = None,
        on_close: Callable[[], None] = lambda: None,
    ):
        """`control`: the control plane, None for a plan that never changes.

        `on_close` runs once, after the loops have ended, and frees the device.
        """
        self.info = info
        self.metrics = metrics
        self._tokenizer = tokenizer
        self._clock = clock
        self._grammars = grammars
        self._threads = [InstanceThread(steps, f"jaxserve-{i}") for i, steps in enumerate(instances)]
        self._router = LeastLoaded(len(self._threads))  # used by the clients' loop alone
        self._ids = itertools.count()
        self.control = control
        self._on_close = on_close
        self._draining = False
        self._closed = False

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise NoTokenizer
        return self._tokenizer

    @property
    def ready(self) -> bool:
        return not self._draining and not self._closed and all(t.alive and t.failure is None for t in self._threads)

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

    def snapshots(self) -> list[Snapshot]:
        return [thread.steps.core.snapshot for thread in self._threads]

    def snapshot(self) -> Snapshot:
        return combine(self.snapshots())

    def check_health(self) -> None:
        """Raise `EngineFailed` if a loop has died, or has work and makes no progress."""
        now = self._clock.now()
        for thread in self._threads:
            if thread.failure is not None or (not thread.alive and not self._closed):
                raise EngineFailed(f"the engine loop has ended: {thread.failure!r}")
            if not thread.steps.idle and now - thread.progress > STALL_SECONDS:
                raise EngineFailed(f"no step has ended for {now - thread.progress:.0f} s although there is work")

    def count_rejection(self, reason: str) -> None:
        self.metrics.rejected(reason)

    def metrics_text(self) -> bytes:
        return self.metrics.render()

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests, and return whether those in flight end within `timeout` seconds."""
        self._draining = True
        end = self._clock.now() + timeout
        while any(t.alive and t.failure is None and (t.streams or not t.steps.idle) for t in self._threads):
            if self._clock.now() >= end:
                return False
            await asyncio.sleep(0.02)
        return True

    async def shutdown(self) -> None:
        """End requests and threads, and free the device. Idempotent."""
        if self._closed:
            return
        self._draining = self._closed = True
        for thread in self._threads:
            thread.stop()
        await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in self._threads))
        self._on_close()

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
        if params.structured is None:
            grammar = grammar_of(params, self._grammars)  # nothing to compile
        else:
            grammar = await asyncio.to_thread(grammar_of, params, self._grammars)
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
            grammar=grammar,
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
        prompt_tokens = len(request.prompt_token_ids)
        index = self._router.take(prompt_tokens)
        thread = self._threads[index]
        loop = asyncio.get_running_loop()
        stream = Stream(loop, asyncio.Queue(), loop.create_future())
        thread.submit(request, stream)
        try:
            await stream.admitted
            yield stream
        finally:
            self._router.ended(index, prompt_tokens)
            thread.abort(request.id, stream)  # no effect on an ended request
