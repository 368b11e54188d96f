"""The requests in flight of an engine: on which instance each of them is, and to whom its outputs go."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from jaxserve.core.clock import Clock
from jaxserve.core.errors import JaxserveError, QueueFull, RequestError
from jaxserve.core.request import Request, RequestOutput
from jaxserve.engine.admission import check_request, check_room
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.outputs import RequestState
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.scheduler.routing import Route, Router, UnroutedQueue, tokens_needed
from jaxserve.telemetry import WaitingRoom

OwnerT = TypeVar("OwnerT")

RouteOf = Callable[[str], Route | None]  # by an instance's name; None: it is not in the plan in force


@dataclass(eq=False, slots=True)
class Entry(Generic[OwnerT]):
    """A request in flight. Only the directory changes on which instance it is."""

    request: Request
    owner: OwnerT  # to whom its outputs go
    needed: int  # tokens that an instance must be able to hold
    instance: str | None = None  # None: it waits in front of the instances
    pending: bool = False  # it was sent to its instance, whose core does not have it yet
    aborted: bool = False  # its client has given up, and its instance is about to forget it
    accepted: bool = False  # an instance, or the queue in front of them, has accepted it
    state: RequestState | None = None  # of a request that has left its instance, until another one has it

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt, which routers count."""
        return len(self.request.prompt_token_ids)


class Directory(Generic[OwnerT]):
    """The requests in flight by their ids, the router, and the queue of requests that no instance can hold now.

    Its methods may be called from any thread. Hold `lock` to use several as one. A request on an instance moves to
    another one only in the thread that steps the instance, or while that thread is stopped.
    """

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Tokenizer | None,
        clock: Clock,
        names: Iterable[str],
        *,
        route: RouteOf | None = None,
        max_model_len: Callable[[], int] | None = None,
        rejected: Callable[[str], None] = lambda reason: None,
    ):
        """`names`: the instances. `route` returns an instance's route under the plan in force.

        `max_model_len` returns the tokens that an instance can hold under the best plan that may come into force. It is
        called for each request. Without these two, all instances hold what `info` says. `rejected` counts a refused
        request by its reason.
        """
        self.lock = threading.RLock()
        self._info, self._tokenizer, self._clock = info, tokenizer, clock
        self._route = route or (lambda name: Route(name, info.max_model_len))
        self._max_model_len = max_model_len or (lambda: info.max_model_len)
        self._rejected = rejected
        self._entries: dict[str, Entry[OwnerT]] = {}
        self._router = Router()
        self._queue: UnroutedQueue[Entry[OwnerT]] = UnroutedQueue()
        self.follow(names)

    @property
    def info(self) -> ModelInfo:
        """The facts about the model, with the limits as they are now."""
        longest = self._max_model_len()
        now = min(self._router.capacity, longest)
        if (longest, now) != (self._info.max_model_len, self._info.instance_len):
            self._info = replace(self._info, max_model_len=longest, instance_len=now)
        return self._info

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, request_id: str) -> Entry[OwnerT] | None:
        """Return a request in flight, or None."""
        return self._entries.get(request_id)

    def on(self, instance: str | None) -> list[Entry[OwnerT]]:
        """Return the requests on an instance, or for None those that wait in front of the instances, in order."""
        with self.lock:
            if instance is None:
                return list(self._queue.in_order())
            return [entry for entry in self._entries.values() if entry.instance == instance]

    def waiting_room(self) -> WaitingRoom:
        """Return the state of the queue in front of the instances."""
        with self.lock:
            return self._queue.snapshot(self._clock.now())

    # -- requests

    def add(self, request: Request, owner: OwnerT) -> Entry[OwnerT]:
        """Register a request, on the instance that shall get it or waiting in front of the instances.

        Raise `RequestError` or `QueueFull`, without any change, if it is refused. The instance may still refuse it.
        """
        entry = Entry(request, owner, tokens_needed(request))
        with self.lock:
            try:
                self._check_id(request.id)
                if not self._find_instance(entry):
                    self._check_wait(request)
                    self._wait(entry)
                    entry.accepted = True
            except RequestError as error:
                self._rejected("queue_full" if isinstance(error, QueueFull) else "invalid")
                raise
            self._entries[request.id] = entry
        return entry

    def instance_for(self, request: Request) -> str | None:
        """Return the instance that `add` would choose for a request, or None if it would wait or be refused."""
        with self.lock:
            return self._router.choose(tokens_needed(request))

    def has_room(self, request: Request) -> bool:
        """Return whether the queue in front of the instances has room. An empty one has room for every request."""
        with self.lock:
            limits, tokens = self._info, len(request.prompt_token_ids) * request.params.n
            return not self._queue or (
                len(self._queue) + request.params.n <= limits.max_queued_requests
                and self._queue.tokens + tokens <= limits.max_queued_tokens
            )

    def end(self, entry: Entry[OwnerT]) -> None:
        """Forget a request that has ended or was refused."""
        with self.lock:
            if self._entries.get(entry.request.id) is entry:
                del self._entries[entry.request.id]
                self._leave(entry)

    def send_again(self, entry: Entry[OwnerT]) -> None:
        """Choose another instance for a request whose instance has ended before its core got the request."""
        with self.lock:
            self._leave(entry)
            if not self._find_instance(entry):
                self._wait(entry)

    def leave(self, state: RequestState, *, outgrown: bool = False) -> None:
        """Let a request that has left its instance wait. `outgrown`: it needs one that can hold more than that one."""
        with self.lock:
            entry = self._entries.get(state.request.id)
            if entry is None:
                return
            needed = [entry.needed, max(len(sequence.tokens) for sequence in state.sequences) + 1]
            if outgrown and entry.instance is not None:
                needed.append(self._router.capacity_of(entry.instance) + 1)
            entry.needed, entry.state = max(needed), state
            self._leave(entry)
            self._wait(entry)

    # -- instances

    def follow(self, names: Iterable[str]) -> None:
        """Route by the plan in force from now on. `names`: the instances that exist."""
        with self.lock:
            self._follow(self._routes(names))

    def moved(
        self, names: Collection[str], ids: Mapping[str, Collection[str]]
    ) -> tuple[list[Entry[OwnerT]], list[Entry[OwnerT]]]:
        """Take note of other instances, with the requests that are now in their cores. If this raises, nothing changes.

        `names`: all instances. `ids`: the ids of requests in the cores of those that are stopped or new. Return the
        requests that were on their way to an instance that is gone, and those that are in no core any more.
        """
        with self.lock:
            routes = self._routes(names)
            for name, request_ids in ids.items():
                for request_id in request_ids:
                    self._found_on(name, request_id)
            placed = [entry for entry in self._entries.values() if entry.instance is not None]
            on_the_way = [e for e in placed if e.pending and e.instance not in names]
            lost = [e for e in placed if not e.pending and not self._is_there(e, names, ids)]
            self._follow(routes)
            return on_the_way, lost

    def _routes(self, names: Iterable[str]) -> list[Route]:
        return [route for name in names if (route := self._route(name)) is not None]

    def _follow(self, routes: Iterable[Route]) -> None:
        outstanding: Counter[str] = Counter()
        for entry in self._entries.values():
            if entry.instance is not None:
                outstanding[entry.instance] += entry.prompt_tokens
        self._router.update(routes, outstanding)

    def _is_there(self, entry: Entry[OwnerT], names: Collection[str], ids: Mapping[str, Collection[str]]) -> bool:
        name = entry.instance
        return name is not None and name in names and (name not in ids or entry.request.id in ids[name])

    def _found_on(self, name: str, request_id: str) -> None:
        entry = self._entries.get(request_id)
        if entry is not None and entry.instance != name:
            if entry.instance is None:
                self._queue.remove(entry)
            entry.instance, entry.pending, entry.state = name, False, None

    def take_waiting(self) -> tuple[list[Entry[OwnerT]], list[tuple[Entry[OwnerT], RequestOutput | JaxserveError]]]:
        """Return the waiting requests that go to an instance now, and those that no instance will ever hold.

        The latter come with their last output, or the error that ends them.
        """
        with self.lock:
            longest, found, hopeless = self._max_model_len(), [], []
            for entry in self._queue.in_order():
                if self._find_instance(entry):
                    self._queue.remove(entry)
                    found.append(entry)
                elif entry.needed > longest:
                    hopeless.append((entry, self._last_output(entry)))
            return found, hopeless

    def _last_output(self, entry: Entry[OwnerT]) -> RequestOutput | JaxserveError:
        if entry.state is not None:
            return entry.state.end_by_length(self._clock.now())
        try:
            check_request(entry.request, self.info, self._tokenizer)
        except RequestError as error:
            return error
        raise AssertionError(f"an instance could hold request {entry.request.id}")

    def _check_id(self, request_id: str) -> None:
        if request_id in self._entries:
            raise RequestError(f"request id {request_id!r} is already in flight", field="request_id", value=request_id)

    def _check_wait(self, request: Request) -> None:
        check_request(request, self.info, self._tokenizer)
        check_room(request, len(self._queue), self._queue.tokens, self._info)

    def _find_instance(self, entry: Entry[OwnerT]) -> bool:
        entry.instance = self._router.take(entry.prompt_tokens, entry.needed)
        entry.pending = entry.instance is not None
        return entry.pending

    def _wait(self, entry: Entry[OwnerT]) -> None:
        request = entry.request
        tokens = entry.prompt_tokens * request.params.n
        self._queue.add(entry, since=request.arrival, tokens=tokens, needed=entry.needed)

    def _leave(self, entry: Entry[OwnerT]) -> None:
        if entry.instance is None:
            self._queue.remove(entry)
        else:
            self._router.ended(entry.instance, entry.prompt_tokens)
            entry.instance, entry.pending = None, False
