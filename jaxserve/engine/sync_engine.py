"""SyncEngine: steps all instances in the caller's thread; what `LLM` is built on. No threads, no signal handlers."""

import itertools
from collections.abc import Callable, Sequence

from jaxserve.core.clock import Clock
from jaxserve.core.request import Request, RequestOutput
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.client import ModelInfo, Prompt, TextPrompt
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.tokenizer import Tokenizer


class SyncEngine:
    """Requests are added, `step` is called until `idle`. Not thread-safe."""

    def __init__(
        self,
        instances: Sequence[StepLoop],
        info: ModelInfo,
        tokenizer: Tokenizer | None,
        clock: Clock,
        *,
        on_close: Callable[[], None] = lambda: None,
    ):
        self.instances = list(instances)
        self.info = info
        self.tokenizer = tokenizer
        self._clock = clock
        self._on_close = on_close
        self._ids = itertools.count()
        self._owners: dict[str, StepLoop] = {}

    def add(self, prompt: Prompt, params: SamplingParams, *, priority: int = 0, embed: bool = False) -> str:
        """Accepts a request and returns its id. Raises `RequestError` or `QueueFull`. Mutates."""
        if isinstance(prompt, TextPrompt):
            if self.tokenizer is None:
                raise ValueError("the model has no tokenizer: give prompts as token ids")
            text: str | None = prompt.text
            token_ids = tuple(self.tokenizer.encode(prompt.text, prompt.add_special_tokens))
        else:
            text, token_ids = prompt.text, tuple(prompt.token_ids)
        request_id = f"request-{next(self._ids)}"
        owner = min(self.instances, key=lambda steps: steps.core.load)
        arrival = self._clock.now()
        owner.core.add(Request(request_id, token_ids, params, arrival, prompt=text, priority=priority, embed=embed))
        self._owners[request_id] = owner
        return request_id

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its pages. Mutates."""
        owner = self._owners.pop(request_id, None)
        if owner is not None:
            owner.core.abort(request_id, now=self._clock.now())

    def step(self) -> list[RequestOutput]:
        """One step of every instance that has work; returns what is new. Mutates."""
        outputs = [output for steps in self.instances if not steps.idle for output in steps.step()]
        for output in outputs:
            if output.finished:
                self._owners.pop(output.request_id, None)
        return outputs

    def settle(self) -> None:
        """Waits for what the executors prepare in the background."""
        for steps in self.instances:
            steps.executor.settle()

    @property
    def room(self) -> int:
        """How many more sequences may be queued before `QueueFull`."""
        return max(self.info.max_queued_requests - steps.core.scheduler.num_waiting for steps in self.instances)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return all(steps.idle for steps in self.instances)

    def close(self) -> None:
        """Frees the device."""
        self._on_close()
