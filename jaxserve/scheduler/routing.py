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
        self._names: list[str] = []
        self._outstanding = np.zeros(0, np.int64)  # prompt tokens of unfinished requests, by instance
        self.update(routes)

    def update(self, routes: Iterable[Route], outstanding: Mapping[str, int] | None = None) -> None:
        """Set the instances that exist now, and their outstanding prompt tokens (default: those counted so far)."""
        routes = list(routes)
        if outstanding is None:
            outstanding = dict(zip(self._names, self._outstanding.tolist(), strict=True))
        self._names = [route.name for route in routes]
        self._index = {name: index for index, name in enumerate(self._names)}
        self._outstanding = np.array([outstanding.get(name, 0) for name in self._names], np.int64)
        self._devices = np.array([route.devices for route in routes], np.int64)
        self._capacities = np.array([route.capacity for route in routes], np.int64)
        self._draining = np.array([route.draining for route in routes], bool)

    @property
    def capacity(self) -> int:
        """The largest capacity of an instance; 0 without instances."""
        return int(self._capacities.max(initial=0))

    def capacity_of(self, name: str) -> int:
        """Return the capacity of an instance; 0 for an unknown one."""
        return int(self._capacities[self._index[name]]) if name in self._index else 0

    def choose(self, needed: int) -> str | None:
        """Return the instance for a request that needs a number of tokens, or None if no instance can hold it.

        Draining instances are chosen only if no other can hold it.
        """
        able = self._capacities >= needed
        chosen = able & ~self._draining
        if not chosen.any():
            chosen = able
            if not chosen.any():
                return None
        return self._names[int(np.where(chosen, self._outstanding / self._devices, np.inf).argmin())]

    def take(self, prompt_tokens: int, needed: int) -> str | None:
        """Return what `choose` does, and count the request's prompt tokens on the instance until `ended`."""
        name = self.choose(needed)
        if name is not None:
            self._outstanding[self._index[name]] += prompt_tokens
        return name

    def ended(self, name: str, prompt_tokens: int) -> None:
        """Stop counting a request that `take` counts on an instance, which may have gone."""
        if name in self._index:
            self._outstanding[self._index[name]] -= prompt_tokens


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
