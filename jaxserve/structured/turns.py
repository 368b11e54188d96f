"""A bounded queue of work that clients choose, in which no client makes another one wait for all of its own work."""

import heapq
from collections import OrderedDict
from collections.abc import Set
from itertools import count
from typing import Generic, TypeVar

Item = TypeVar("Item")


class TurnsFull(Exception):
    """Raised when a client, or all of them together, have too much work waiting. `limit`: how much may wait."""

    def __init__(self, limit: int, own: bool):
        super().__init__(f"{limit} are waiting{' for this client' if own else ''}")
        self.limit = limit


class Turns(Generic[Item]):
    """Clients have turns, and each takes the smallest of its work first. Not thread-safe."""

    def __init__(self, limit: int, limit_of_client: int):
        """`limit` of the work that waits, and of that of one client."""
        self._limit, self._limit_of_client = limit, limit_of_client
        self._waiting: OrderedDict[str, list[tuple[int, int, Item]]] = OrderedDict()  # heaps, the next client first
        self._numbers = count()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, client: str, size: int, item: Item) -> None:
        """Let an item wait. Raise `TurnsFull` if there is no room for it."""
        own = self._waiting.get(client, [])
        if len(own) >= self._limit_of_client or len(self) >= self._limit:
            full = len(own) >= self._limit_of_client
            raise TurnsFull(self._limit_of_client if full else self._limit, own=full)
        heapq.heappush(own, (size, next(self._numbers), item))
        self._waiting[client] = own

    def take(self, without: Set[str] = frozenset()) -> Item | None:
        """Take the next item, None if none waits. `without`: the clients that have no turn now."""
        client = next((each for each in self._waiting if each not in without), None)
        if client is None:
            return None
        own = self._waiting.pop(client)
        _, _, item = heapq.heappop(own)
        if own:
            self._waiting[client] = own  # behind all others
        return item

    def remove(self, client: str, item: Item) -> None:
        """Remove an item if it still waits."""
        own = [each for each in self._waiting.get(client, []) if each[2] is not item]
        heapq.heapify(own)
        if own:
            self._waiting[client] = own
        else:
            self._waiting.pop(client, None)
