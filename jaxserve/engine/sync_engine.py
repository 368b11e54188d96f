"""The synchronous engine, which steps all instances in the caller's thread. `LLM` runs it in an `EngineThread`."""

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from jaxserve.core.clock import Clock
from jaxserve.core.errors import EngineFailed, JaxserveError, NoTokenizer
from jaxserve.core.request import FinishReason, Request, RequestOutput
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.structured import GrammarCompiler
from jaxserve.engine.client import ModelInfo, Prompt, TextPrompt
from jaxserve.engine.directory import Directory, Entry, RouteOf
from jaxserve.engine.instances import STALL_SECONDS, EndedInstances, lost_request, report_end
from jaxserve.engine.limits import grammar_of
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.outputs import RequestState, failed_output
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.telemetry import Snapshot, WaitingRoom

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.02  # how long a step waits if all requests wait for a change of the plan


class SyncEngine:
    """An engine whose caller adds requests, and calls `step` until it is `idle`. It is also an `InstanceSet`.

    One thread at a time may use it. Only `StepLoop.call` and the methods of `InstanceSet` are for other threads.
    """

    def __init__(
        self,
        instances: Mapping[str, StepLoop],
        info: ModelInfo,
        tokenizer: Tokenizer | None,
        clock: Clock,
        *,
        grammars: GrammarCompiler | None = None,
        route: RouteOf | None = None,
        max_model_len: Callable[[], int] | None = None,
        on_close: Callable[[], None] = lambda: None,
    ):
        """`route` and `max_model_len` say what instances hold now and at best, as for `Directory`."""
        self.tokenizer = tokenizer
        self._clock = clock
        self._grammars = grammars
        self._on_close = on_close
        self._ids = itertools.count()
        self._loops = dict(instances)  # never changed, but replaced
        self._directory: Directory[None] = Directory(
            info,
            tokenizer,
            clock,
            instances,
            route=route,
            max_model_len=max_model_len,
            rejected=next(iter(instances.values())).core.metrics.rejected,
        )
        self._failed: dict[str, BaseException] = {}  # instances that keep their requests
        self._given_up: set[str] = set()  # failed instances whose requests have ended
        self._can_recover: Callable[[str], bool] = lambda name: False
        self._outputs: list[RequestOutput] = []  # that the next step returns
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # for between two steps
        self._ended: EndedInstances[StepLoop] = EndedInstances()
        self._changed = threading.Event()  # set when requests that wait may have found an instance
        self._turn = threading.Lock()  # held while instances change
        for steps in instances.values():
            steps.wake = self._run_calls

    @property
    def info(self) -> ModelInfo:
        """The facts about the model, with the limits as they are now."""
        return self._directory.info

    def add(self, prompt: Prompt, params: SamplingParams, *, embed: bool = False, stream: bool = True) -> str:
        """Accept a request and return its id. Raise `RequestError` or `QueueFull`."""
        request = self.request(prompt, params, embed=embed, stream=stream)
        self.accept(request)
        return request.id

    def request(self, prompt: Prompt, params: SamplingParams, *, embed: bool = False, stream: bool = True) -> Request:
        """Return a request for `accept` with its prompt tokenized. Raise `NoTokenizer` for text without a tokenizer."""
        if isinstance(prompt, TextPrompt):
            if self.tokenizer is None:
                raise NoTokenizer
            text: str | None = prompt.text
            token_ids = tuple(self.tokenizer.encode(prompt.text, prompt.add_special_tokens))
        else:
            text, token_ids = prompt.text, tuple(prompt.token_ids)
        request_id = f"request-{next(self._ids)}"
        arrival = self._clock.now()
        grammar = grammar_of(params, self._grammars)
        return Request(request_id, token_ids, params, arrival, prompt=text, embed=embed, stream=stream, grammar=grammar)

    def has_room(self, request: Request) -> bool:
        """Return whether the queue that a request would join has room, as `EngineCore.has_room`."""
        name = self._directory.instance_for(request)
        return self._directory.has_room(request) if name is None else self._loops[name].core.has_room(request)

    def accept(self, request: Request) -> None:
        """Accept a request. Raise `RequestError` or `QueueFull`."""
        with self._turn:
            entry = self._directory.add(request, None)
            if entry.instance is not None:
                try:
                    self._send(entry)
                except BaseException:
                    self._directory.end(entry)
                    raise
        self._run_calls()

    def abort(self, request_id: str) -> None:
        """End a request and free its pages. Unknown ids are ignored."""
        with self._turn:
            self._outputs = [output for output in self._outputs if output.request_id != request_id]
            entry = self._directory.get(request_id)
            if entry is not None:
                if entry.instance is None:
                    self._report_end(entry, None)
                self._directory.end(entry)
            for steps in self._loops.values():
                if request_id in steps.core.request_ids:
                    steps.core.abort(request_id, now=self._clock.now())
        self._run_calls()

    def step(self) -> list[RequestOutput]:
        """Step every instance that has work, and return the new outputs."""
        with self._turn:
            self._changed.clear()
            working = [n for n, steps in self._loops.items() if not (steps.idle or n in self._failed)]
            for name in working:
                self._take(self._or_failed(name, self._loops[name].step))
                self._leave(self._loops[name].core.take_outgrown(), outgrown=True)
            outputs, self._outputs = self._outputs, []
        self._run_calls()
        if not (working or outputs or self.idle):
            self._changed.wait(PAUSE_SECONDS)
        return outputs

    @property
    def idle(self) -> bool:
        """True if no request waits, no instance has a request or a step in flight, and no output is to be returned."""
        return not (self._directory or self._outputs) and all(steps.idle for steps in self._loops.values())

    def snapshots(self) -> dict[str, Snapshot]:
        """Return the state of each instance by its name."""
        return {name: steps.core.snapshot for name, steps in self._loops.items()}

    def waiting_room(self) -> WaitingRoom:
        """Return the state of the requests that no instance can hold now."""
        return self._directory.waiting_room()

    def close(self) -> None:
        """Free the device."""
        self._on_close()

    # -- instances that come and go, as `InstanceSet`

    @property
    def loops(self) -> Mapping[str, StepLoop]:
        return self._loops

    @contextmanager
    def stopped(self, names: Collection[str]) -> Iterator[None]:
        if not self._turn.acquire(timeout=STALL_SECONDS):
            raise EngineFailed(f"the engine has not ended its step for {STALL_SECONDS:.0f} s")
        try:
            for name in names:
                self._loops[name].run_calls()
                self._take(self._or_failed(name, self._loops[name].drain))
            yield
        finally:
            self._ended.settle(self._loops)
            self._turn.release()
            self.reroute()

    def replace(
        self, before: Collection[str], after: Mapping[str, StepLoop], homeless: Iterable[RequestState] = ()
    ) -> None:
        without_home = {state.request.id: state for state in homeless}
        ending = [self._loops[name] for name in before]
        loops = {name: steps for name, steps in self._loops.items() if name not in before} | dict(after)
        ids = {name: tuple(steps.core.request_ids) for name, steps in loops.items()}
        _, lost = self._directory.moved(loops, ids)
        self._loops = loops
        self._failed = {name: error for name, error in self._failed.items() if name in loops}
        for steps in after.values():
            steps.wake = self._run_calls
        for entry in lost:
            if state := without_home.get(entry.request.id):
                self._directory.leave(state)  # it is sent to an instance at the exit of `stopped`
            else:
                self._end(entry, lost_request(entry.request))
        self._ended.add(ending)

    @property
    def failed(self) -> Mapping[str, BaseException]:
        return dict(self._failed)

    def give_up(self, name: str) -> None:
        def end_requests() -> None:
            if error := self._failed.get(name):
                self._given_up.add(name)
                for entry in self._directory.on(name):
                    self._loops[name].core.abort(entry.request.id, FinishReason.ERROR, self._clock.now())
                    self._end(entry, EngineFailed(f"instance {name} has failed: {error}"))

        self._calls.put(end_requests)
        self._run_calls()

    def recover_by(self, can_recover: Callable[[str], bool]) -> None:
        self._can_recover = can_recover

    def _or_failed(self, name: str, step: Callable[[], list[RequestOutput]]) -> list[RequestOutput]:
        """Return the outputs of steps. If these fail, the instance steps no more; raise unless others go on for it."""
        try:
            return step()
        except Exception as error:
            self._loops[name].core.metrics.failed()
            if not self._can_recover(name):
                raise
            log.exception("instance %s has failed", name)
            self._failed[name] = error
            return self._loops[name].abandon()

    def place(self, states: Iterable[RequestState]) -> None:
        self._leave(states)
        self._run_calls()

    def reroute(self) -> None:
        def follow() -> None:
            self._directory.follow(self._loops)
            self._send_waiting()

        self._calls.put(follow)
        self._run_calls()

    def _leave(self, states: Iterable[RequestState], *, outgrown: bool = False) -> None:
        for state in states:
            self._directory.leave(state, outgrown=outgrown)
            self._calls.put(self._send_waiting)

    def _send_waiting(self) -> None:
        """Give the waiting requests that an instance can hold now to it, and end those that none will ever hold."""
        found, hopeless = self._directory.take_waiting()
        for entry in found:
            try:
                self._send(entry)
            except JaxserveError as error:
                self._end(entry, error)
        for entry, item in hopeless:
            self._end(entry, item)
        self._changed.set()

    def _send(self, entry: Entry[None]) -> None:
        assert entry.instance is not None
        if entry.instance in self._given_up:
            raise EngineFailed(f"instance {entry.instance} has failed")
        steps = self._loops[entry.instance]
        if entry.state is None:
            steps.add(entry.request, self.info, accepted=entry.accepted)
        else:
            steps.core.attach([entry.state], None, self._clock.now())
        entry.pending, entry.accepted, entry.state = False, True, None

    def _take(self, outputs: list[RequestOutput]) -> None:
        """Return outputs with the next step, and forget the requests that have ended."""
        self._outputs += outputs
        for output in outputs:
            if output.finished and (entry := self._directory.get(output.request_id)) is not None:
                self._directory.end(entry)

    def _end(self, entry: Entry[None], item: RequestOutput | JaxserveError) -> None:
        self._directory.end(entry)
        self._report_end(entry, item)
        self._outputs.append(item if isinstance(item, RequestOutput) else failed_output(entry.request, item))

    def _report_end(self, entry: Entry[None], item: RequestOutput | JaxserveError | None) -> None:
        core = next(iter(self._loops.values())).core
        report_end(core, entry, item, self._clock.now())

    def _run_calls(self) -> None:
        """Run the functions that wait to run between two steps, unless a step is in progress.

        A step ends with a call of this method, because no further step may follow it.
        """
        while self._has_calls and self._turn.acquire(blocking=False):
            try:
                for steps in tuple(self._loops.values()):
                    steps.run_calls()
                while not self._calls.empty():
                    self._calls.get()()
            finally:
                self._turn.release()

    @property
    def _has_calls(self) -> bool:
        return not self._calls.empty() or any(steps.has_calls for steps in self._loops.values())
