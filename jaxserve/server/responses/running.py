"""The generation of a response: for the client that waits, or in the background."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

from jaxserve.core.request import RequestOutput
from jaxserve.server.answers.conversation import ConversationJob
from jaxserve.server.http.json_text import plain_json, to_json
from jaxserve.server.http.offload import off_loop_if_large
from jaxserve.server.http.streaming import failure_of, named_event, plain_event
from jaxserve.server.responses.events import ResponseEvents
from jaxserve.server.responses.items import Json
from jaxserve.server.responses.store import ResponseStore, StoredResponse

logger = logging.getLogger(__name__)

LOGPROBS_SIZE = 100  # characters of JSON per listed token


class RunningResponse:
    """One response while it is generated. It is kept in `store` when it ends, unless `stored` is None.

    `repeated_size`: roughly the characters of JSON of what the response repeats of its request.
    """

    def __init__(
        self,
        work: ConversationJob,
        events: ResponseEvents,
        store: ResponseStore,
        stored: StoredResponse | None,
        repeated_size: int = 0,
    ):
        self.events = events
        self._work, self._store, self._stored, self._repeated_size = work, store, stored, repeated_size
        self._task: asyncio.Task[None] | None = None
        self._sent = 0  # events that have been sent, or logged

    @property
    def id(self) -> str:
        """The id of the response."""
        return self.events.id

    async def whole(self) -> bytes:
        """Generate everything and return the response as JSON."""
        async with contextlib.aclosing(self._work.job.run(self._work.client, stream=False)) as outputs:
            async for _, output in outputs:
                await off_loop_if_large(_size(output), self._add, output)
        data = await self.written()
        self._keep(data)
        return data

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the response. It is kept before the last one, after which the client may continue it."""
        async with contextlib.aclosing(self._outputs()) as parts:
            async for part in parts:
                written = await self._write(part)
                if self.events.ended:
                    self._keep(await self.written())
                for event in written:
                    self._sent += 1
                    yield event

    def fail(self, error: Exception) -> list[bytes]:
        """Return the last events of a response that an error ends, none if it has ended, and keep it as failed."""
        if self.events.ended and self._sent >= self.events.number:
            return []
        sent = self._sent
        try:
            events = _written_events(self.events.fail(error, sent))
            data = to_json(self.events.response())
        except Exception:
            logger.exception("a response that failed cannot be shown")
            last, response = self.events.fail_plainly(sent)
            events, data = [plain_event(event) for event in last], plain_json(response)
        try:
            self._keep(data)
        except Exception:
            logger.exception("a response that failed cannot be kept")
            self._settle(data)
        return events

    async def start(self) -> bytes:
        """Generate the response in the background, and return it as JSON. Its client gets the rest of it later.

        Raise BackgroundFull if other responses in the background take the memory for it.
        """
        stored = self._stored
        assert stored is not None
        events = await self._write(self.events.begin())
        self._sent = len(events)
        stored.running, stored.data = self, await self.written()
        stored.append(events)
        self._store.put(stored)
        self._task = asyncio.create_task(self._in_background())
        return stored.data

    async def cancel(self) -> None:
        """End a response in the background, unless it has ended already."""
        assert self._task is not None
        if not self.events.ended:
            self._task.cancel()
        await asyncio.wait((self._task,))

    @property
    def stored(self) -> StoredResponse:
        """The response as it is kept."""
        assert self._stored is not None
        return self._stored

    async def _outputs(self) -> AsyncGenerator[list[Json], None]:
        """Yield the events for each output of the engine."""
        async with contextlib.aclosing(self._work.job.run(self._work.client)) as outputs:
            async for _, output in outputs:
                yield [*self.events.begin(), *self.events.run(), *self._add(output)]

    async def _in_background(self) -> None:
        assert self._stored is not None
        last: list[bytes] = []
        try:
            async with contextlib.aclosing(self._outputs()) as parts:
                async for part in parts:
                    last = await self._log(part)
            self._keep(await self.written())
        except (Exception, asyncio.CancelledError) as error:
            last = await self._ended_early(error)
        self._sent += len(last)
        self._stored.append(last)

    async def _ended_early(self, error: BaseException) -> list[bytes]:
        """Return the last events of a response in the background that an error or its client ends, and keep it."""
        try:
            failure = failure_of(error, "a response in the background")
        except asyncio.CancelledError:
            try:
                self.events.cancel()
                self._keep(await self.written())
            except Exception as failed:
                return self.fail(failed)
            return []
        return self.fail(failure)

    async def _log(self, events: list[Json]) -> list[bytes]:
        """Add events to the log, but return the last ones of the response, which follow once it is kept.

        Raise BackgroundFull if there is no memory for them.
        """
        stored = self._stored
        assert stored is not None
        if stored.log is None:
            self._sent = self.events.number
            return []
        written = await self._write(events)
        if self.events.ended:
            return written
        self._sent += len(written)
        stored.append(written)
        if self._store.keeps(stored):
            self._store.grow(stored)
        return []

    async def _write(self, events: list[Json]) -> list[bytes]:
        """Return the text of events. Those that repeat a large request or answer are written off the event loop."""
        snapshots = sum("response" in event for event in events)
        repeats = snapshots or any(event["type"].endswith(".done") for event in events)
        size = snapshots * self._repeated_size + (self._output_size() if repeats else 0)
        return await off_loop_if_large(size, _written_events, events)

    def _add(self, output: RequestOutput) -> list[Json]:
        self.events.cached_tokens = max(self.events.cached_tokens, output.num_cached_tokens)
        return [event for answer in output.outputs for event in self.events.add(answer)]

    async def written(self) -> bytes:
        """Return the response so far as JSON."""
        response = self.events.response()
        return await off_loop_if_large(self._repeated_size + self._output_size(), to_json, response)

    def _output_size(self) -> int:
        return sum(map(_item_size, self.events.output))

    def _keep(self, data: bytes) -> None:
        """Keep the response, which has ended, unless its client has deleted it meanwhile."""
        stored = self._stored
        if stored is None:
            return
        self._store.end(stored)
        self._settle(data)
        if stored.background and not self._store.keeps(stored):
            return
        stored.turn.add(map(_without_logprobs, self.events.output))
        self._store.put(stored)

    def _settle(self, data: bytes) -> None:
        """Let the response be what it is now, as JSON."""
        if self._stored is not None:
            self._stored.running, self._stored.data, self._stored.continuable = None, data, True


def _written_events(events: list[Json]) -> list[bytes]:
    return [named_event(event) for event in events]


def _without_logprobs(item: Json) -> Json:
    """Return an item as a conversation needs it later."""
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


def _size(output: RequestOutput) -> int:
    steps = [step for answer in output.outputs for step in answer.logprobs or ()]
    return sum(len(answer.token_ids) for answer in output.outputs) + sum(map(len, steps))


def _item_size(item: Json) -> int:
    """Return roughly the characters of an item's JSON."""
    parts = item.get("content", ())
    logprobs = sum(len(entry["top_logprobs"]) + 1 for part in parts for entry in part.get("logprobs", ()))
    return sum(len(part["text"]) for part in parts) + logprobs * LOGPROBS_SIZE + len(item.get("arguments", ""))
