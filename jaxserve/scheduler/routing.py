"""Routing of requests to instances, which come and go, and the queue of those that no instance can hold now."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from jaxserve.core.request import Request
from jaxserve.telemetry import WaitingRoom

RequestT = TypeVar("RequestT")


@dataclass(frozen=True)
class Route:
    """What a router knows about an instance."""

    name: str
    capacity: int  # tokens of one sequence, prompt and answer together, that the instance can hold
    devices: int = 1
    draining: bool = False  # it gets no new request that another instance can hold


def tokens_needed(request: Request) -> int:
    """Return the tokens that an instance must be able to hold to serve a request.

    If the request sets no `max_tokens`, its answer may become longer than that, and then needs another instance.
    """
    prompt, answer = len(request.prompt_token_ids), request.params.max_tokens
    if request.embed:
        return prompt
    return prompt + (1 if answer is None else answer)


class Router:
    """A router that picks the least loaded instance that can hold a request, or the first of several.

    The load is the number of outstanding prompt tokens for each device. One thread at a time may use it.
    """

    def __init__(self, routes: Iterable[Route] = ()):
        self._index: dict[str, int] = {}
        self._outstanding: list[int] = []  # prompt tokens of unfinished requests, by instance
        self.update(routes)

    def update(self, routes: Iterable[Route], outstanding: Mapping[str, int] | None = None) -> None:
        """Set the instances that exist now, and their outstanding prompt tokens (default: those counted so far)."""
        if outstanding is None:
            outstanding = {name: self._outstanding[index] for name, index in self._index.items()}
        self._routes = list(routes)
        self._index = {route.name: index for index, route in enumerate(self._routes)}
        self._outstanding = [outstanding.get(route.name, 0) for route in self._routes]
        pairs = zip(self._outstanding, self._routes, strict=True)
        self._loads = np.array([tokens / route.devices for tokens, route in pairs])
        self._capacities = np.array([route.capacity for route in self._routes], np.int64)
        self._open = np.array([-1 if route.draining else route.capacity for route in self._routes], np.int64)
        self._held_by_all = int(self._open.min()) if self._routes else -1  # tokens

    @property
    def capacity(self) -> int:
        """The largest capacity of an instance; 0 without instances."""
        return int(self._capacities.max(initial=0))

    def capacity_of(self, name: str) -> int:
        """Return the capacity of an instance; 0 for an unknown one."""
        return self._routes[self._index[name]].capacity if name in self._index else 0

    def choose(self, needed: int) -> str | None:
        """Return the instance for a request that needs a number of tokens, or None if no instance can hold it.

        Draining instances are chosen only if no other can hold it.
        """
        if needed <= self._held_by_all:
            return self._routes[int(self._loads.argmin())].name
        for capacities in (self._open, self._capacities):
            able = capacities >= needed
            if able.any():
                return self._routes[int(np.where(able, self._loads, np.inf).argmin())].name
        return None

    def take(self, prompt_tokens: int, needed: int) -> str | None:
        """Return what `choose` does, and count the request's prompt tokens on the instance until `ended`."""
        name = self.choose(needed)
        if name is not None:
            self._count(self._index[name], prompt_tokens)
        return name

    def ended(self, name: str, prompt_tokens: int) -> None:
        """Stop counting a request that `take` counts on an instance, which may have gone."""
        if name in self._index:
            self._count(self._index[name], -prompt_tokens)

    def _count(self, index: int, prompt_tokens: int) -> None:
        self._outstanding[index] += prompt_tokens
        self._loads[index] = self._outstanding[index] / self._routes[index].devices


@dataclass
class _Waiting:
    since: float
    tokens: int  # of the prompt, once for each answer
    needed: int


class UnroutedQueue(Generic[RequestT]):
    """The requests that no instance can hold now, but one could after a change of the plan, in order of arrival.

    One thread at a time may use it.
    """

    def __init__(self) -> None:
        self._waiting: dict[RequestT, _Waiting] = {}
        self.tokens = 0  # prompt tokens of all answers

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: RequestT, *, since: float, tokens: int, needed: int) -> None:
        """Append a request that needs `needed` tokens on one instance. `since` is the time of its arrival."""
        self._waiting[request] = _Waiting(since, tokens, needed)
        self.tokens += tokens

    def remove(self, request: RequestT) -> None:
        """Take a request out, if it waits."""
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            self.tokens -= waiting.tokens

    def in_order(self) -> tuple[RequestT, ...]:
        """Return the waiting requests, the first one first."""
        return tuple(self._waiting)

    def snapshot(self, now: float) -> WaitingRoom:
        """Return what policies and metrics see."""
        waiting = self._waiting.values()
        return WaitingRoom(
            time=now,
            count=len(waiting),
            tokens=self.tokens,
            longest=max((each.needed for each in waiting), default=0),
            oldest_wait=max((now - each.since for each in waiting), default=0.0),
        )
