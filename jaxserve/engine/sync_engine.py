"""The synchronous engine, which steps all instances in the caller's thread. `LLM` runs it in an `EngineThread`."""

import itertools
import threading
from collections.abc import Callable, Sequence

from jaxserve.core.clock import Clock
from jaxserve.core.errors import NoTokenizer
from jaxserve.core.request import Request, RequestOutput
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.structured import GrammarCompiler
from jaxserve.engine.client import ModelInfo, Prompt, TextPrompt
from jaxserve.engine.limits import grammar_of
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.tokenizer import Tokenizer


class SyncEngine:
    """An engine whose caller adds requests, and calls `step` until it is `idle`.

    One thread at a time may use it. Only `StepLoop.call` is thread-safe.
    """

    def __init__(
        self,
        instances: Sequence[StepLoop],
        info: ModelInfo,
        tokenizer: Tokenizer | None,
        clock: Clock,
        *,
        grammars: GrammarCompiler | None = None,
        on_close: Callable[[], None] = lambda: None,
    ):
        self.instances = list(instances)
        self.info = info
        self.tokenizer = tokenizer
        self._clock = clock
        self._grammars = grammars
        self._on_close = on_close
        self._ids = itertools.count()
        self._owners: dict[str, StepLoop] = {}
        self._turn = threading.Lock()  # held while instances change
        for steps in self.instances:
            steps.wake = self._run_calls

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
        """Return whether the queue has room for a request, as `EngineCore.has_room`."""
        return self._least_loaded.core.has_room(request)

    def accept(self, request: Request) -> None:
        """Accept a request. Raise `RequestError` or `QueueFull`."""
        with self._turn:
            owner = self._least_loaded
            owner.add(request)
            self._owners[request.id] = owner
        self._run_calls()

    def abort(self, request_id: str) -> None:
        """End a request and free its pages. Unknown ids are ignored."""
        with self._turn:
            owner = self._owners.pop(request_id, None)
            if owner is not None:
                owner.core.abort(request_id, now=self._clock.now())
        self._run_calls()

    def step(self) -> list[RequestOutput]:
        """Step every instance that has work, and return the new outputs."""
        outputs: list[RequestOutput] = []
        with self._turn:
            for steps in self.instances:
                if not steps.idle:
                    outputs += steps.step()
            for output in outputs:
                if output.finished:
                    self._owners.pop(output.request_id, None)
        self._run_calls()
        return outputs

    def settle(self) -> None:
        """Wait until the executors have compiled everything that they prepare in the background."""
        for steps in self.instances:
            steps.executor.settle()

    @property
    def idle(self) -> bool:
        """True if no instance has a request or a step in flight."""
        return all(steps.idle for steps in self.instances)

    def close(self) -> None:
        """Free the device."""
        self._on_close()

    @property
    def _least_loaded(self) -> StepLoop:
        return min(self.instances, key=lambda steps: steps.core.load)

    def _run_calls(self) -> None:
        """Run the functions that wait to run between two steps, unless a step is in progress.

        A step ends with a call of this method, because no further step may follow it.
        """
        while any(steps.has_calls for steps in self.instances) and self._turn.acquire(blocking=False):
            try:
                for steps in self.instances:
                    steps.run_calls()
            finally:
                self._turn.release()
