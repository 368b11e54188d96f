"""The responses that are kept for later requests, in a bounded amount of memory."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic_core import from_json

from jaxserve.core.errors import QueueFull, RequestError
from jaxserve.server.errors import response_parts
from jaxserve.server.http.json_text import to_json
from jaxserve.server.http.streaming import named_event
from jaxserve.server.responses.items import Json
from jaxserve.server.schemas.response_items import Item

if TYPE_CHECKING:
    from jaxserve.server.responses.running import RunningResponse

Owner = int | None  # the number of the API key that a client sent, None on a server without keys
OVERHEAD = 300  # bytes of a response or an item besides its JSON, roughly


class ResponseNotFound(RequestError):
    """Raised for a response that does not exist, or no longer, or belongs to another client."""

    status = 404
    code = "not_found"


class BackgroundFull(QueueFull):
    """Raised if a client's responses in the background take too much memory, until some of them have ended."""

    code = "background_full"


class PreviousResponseNotFound(RequestError):
    """Raised if the response that a request continues is not kept."""

    code = "previous_response_not_found"


@dataclass(eq=False)
class Turn:
    """The part of a conversation that one response added: the items of its input and output as JSON, by id.

    `previous`: the turn that it continues, which is kept as long as this one.
    """

    owner: Owner
    previous: "Turn | None" = None
    items: dict[str, bytes] = field(default_factory=dict)
    users: int = 0  # kept responses and later turns that need this one
    booked: int = 0  # bytes

    def add(self, items: Iterable[Item]) -> None:
        """Add items, which have ids."""
        self.items.update({item["id"]: to_json(item) for item in items})

    def conversation(self) -> "list[Turn]":
        """Return the turns of the conversation up to this one, from the first on."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.previous
        return turns[::-1]


@dataclass(eq=False)
class StoredResponse:
    """A response, and its turn in a conversation.

    `inputs`: the number of the turn's items that are input. `running`: its generation in the background, None once that
    has ended. Then `data` is the response as JSON, and `continuable` says whether a conversation can go on after it.
    `log`: the events of a response in the background that can be streamed, None for other responses.
    """

    id: str
    turn: Turn
    inputs: int
    running: "RunningResponse | None" = None
    data: bytes = b""
    continuable: bool = False
    background: bool = False
    log: list[bytes] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)  # set and replaced when the log grows or is complete
    booked: int = 0  # bytes
    _log_bytes: int = 0

    @property
    def size(self) -> int:
        """The memory that the response takes beside its turn, in bytes. While it runs, its prompt takes some too."""
        prompt = 0 if self.running is None else self.turn.booked
        return OVERHEAD + len(self.data) + self._log_bytes + prompt

    @property
    def num_items(self) -> int:
        """The number of items in the conversation up to this response."""
        return sum(len(turn.items) for turn in self.turn.conversation())

    def given(self) -> tuple[list[str], list[bytes]]:
        """Return the ids and the JSON of all items that the model was given: those of earlier turns, and the input."""
        *earlier, last = self.turn.conversation()
        items = [item for turn in earlier for item in turn.items.items()] + [*last.items.items()][: self.inputs]
        return [id for id, _ in items], [item for _, item in items]

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events in the log whose sequence numbers are greater than `after`, and new ones until the last."""
        assert self.log is not None
        position = after + 1
        while True:
            running, news = self.running, self.news
            for event in self.log[position:]:
                yield event
                position += 1
            if running is None:
                return
            await news.wait()

    def follow_failure(self, error: Exception) -> list[bytes]:
        """Return the last event for one who follows the log, which an error keeps from going on."""
        cause = response_parts(error)[1]["error"]
        shown = {name: cause[name] for name in ("code", "message", "param")}
        return [named_event({"type": "error", "sequence_number": len(self.log or ()), **shown})]

    def append(self, events: Sequence[bytes]) -> None:
        """Add events to the log if there is one, and wake those who follow it."""
        if self.log is not None:
            self.log += events
            self._log_bytes += sum(map(len, events))
        self.news.set()
        self.news = asyncio.Event()


class ResponseStore:
    """At most `max_responses` responses in at most `max_bytes`.

    A response is visible to its owner alone. If there are too many, those of the owner who uses the most memory are
    dropped, the least recently used first, so that no client displaces the responses of others who keep little.
    Responses that still run are not dropped, but those of one owner take at most half of the memory.
    """

    def __init__(self, max_responses: int, max_bytes: int):
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._turns: dict[tuple[Owner, str], Turn] = {}  # by the ids of their items
        self._bytes: Counter[Owner] = Counter()
        self._running_bytes: Counter[Owner] = Counter()  # of responses that run, without their turns

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def enabled(self) -> bool:
        """True if responses are kept at all."""
        return self._max_responses > 0

    @property
    def size(self) -> int:
        """The memory that the responses take."""
        return self._bytes.total()

    def put(self, stored: StoredResponse) -> None:
        """Keep a response, or book how it has grown, and drop others if there is no room.

        Raise BackgroundFull, and drop the response, if it runs and there is no room for it.
        """
        if stored.id not in self._kept:
            self._kept[stored.id] = stored
            self._hold(stored.turn)
        self._book(stored.turn)
        try:
            self.grow(stored)
        except BackgroundFull:
            self._drop(stored)
            raise
        if stored.booked + stored.turn.booked > self._max_bytes and stored.running is None:
            self._drop(stored)
        while len(self._kept) > self._max_responses or self.size > self._max_bytes:
            oldest = self._oldest()
            if oldest is None:
                return
            self._drop(oldest)

    def grow(self, stored: StoredResponse) -> None:
        """Book how a kept response has grown. Raise BackgroundFull if it runs and there is no room for it."""
        self._resize(stored, stored.size)
        used, limit = self._running_bytes[stored.turn.owner], self._max_bytes // 2
        if stored.running is not None and used > limit:
            raise BackgroundFull(
                f"responses in the background take {used} bytes, of {limit} that they may take together "
                "(half of --stored-responses-mb): send the request again later",
                field="background",
                value=used,
                limit=limit,
            )

    def end(self, stored: StoredResponse) -> None:
        """Note that a response does not run any more."""
        booked = stored.booked
        self._resize(stored, 0)
        stored.running = None
        self._resize(stored, booked)

    def get(self, id: str, owner: Owner) -> StoredResponse:
        """Return a response and mark it as used. Raise ResponseNotFound."""
        stored = self._kept.get(id)
        if stored is None or stored.turn.owner != owner:
            raise ResponseNotFound(f"the response {id[:128]!r} is not kept here", field="response_id", value=id[:128])
        self._kept.move_to_end(id)
        return stored

    def previous(self, id: str | None, owner: Owner) -> Turn | None:
        """Return the turn that a request continues, None if it begins a conversation.

        Raise PreviousResponseNotFound if it is not kept, and RequestError if it has no complete answer.
        """
        if id is None:
            return None
        field = "previous_response_id"
        try:
            stored = self.get(id, owner)
        except ResponseNotFound:
            raise PreviousResponseNotFound(
                f"{field} is {id[:128]!r}, which is not kept here: send the whole conversation as input",
                field=field,
                value=id[:128],
            ) from None
        if not stored.continuable:
            raise RequestError(f"{field} is {id[:128]!r}, which has not been answered", field=field, value=id)
        return stored.turn

    def item(self, id: str, owner: Owner) -> bytes | None:
        """Return an item of any response by its id, as JSON, None if it is not kept."""
        turn = self._turns.get((owner, id))
        return None if turn is None else turn.items[id]

    def delete(self, id: str, owner: Owner) -> StoredResponse:
        """Drop a response and return it. Raise ResponseNotFound."""
        stored = self.get(id, owner)
        self._drop(stored)
        return stored

    def keeps(self, stored: StoredResponse) -> bool:
        """Return whether a response has not been dropped."""
        return stored.id in self._kept

    def _oldest(self) -> StoredResponse | None:
        """Return the response to drop next, None if all of them still run."""
        ended = [stored for stored in self._kept.values() if stored.running is None]
        return max(ended, key=lambda stored: self._bytes[stored.turn.owner], default=None)  # the first of equals

    def _drop(self, stored: StoredResponse) -> None:
        del self._kept[stored.id]
        self._resize(stored, 0)
        turn: Turn | None = stored.turn
        while turn is not None:
            turn.users -= 1
            if turn.users:
                return
            self._bytes[turn.owner] -= turn.booked
            for id in turn.items:
                if self._turns.get((turn.owner, id)) is turn:
                    del self._turns[turn.owner, id]
            turn.booked, turn = 0, turn.previous

    def _resize(self, stored: StoredResponse, size: int) -> None:
        change = size - stored.booked
        self._bytes[stored.turn.owner] += change
        if stored.running is not None:
            self._running_bytes[stored.turn.owner] += change
        stored.booked = size

    def _hold(self, turn: Turn) -> None:
        """Count a new use of a turn. One that nothing used before uses the turn before it."""
        current: Turn | None = turn
        while current is not None:
            current.users += 1
            if current.users > 1:
                return
            self._book(current)
            current = current.previous

    def _book(self, turn: Turn) -> None:
        size = sum(len(item) + OVERHEAD for item in turn.items.values())
        self._bytes[turn.owner] += size - turn.booked
        turn.booked = size
        self._turns.update({(turn.owner, id): turn for id in turn.items})


def parsed(turns: Iterable[Turn]) -> Iterator[Json]:
    """Yield the items of turns."""
    for turn in turns:
        for item in turn.items.values():
            yield from_json(item)
