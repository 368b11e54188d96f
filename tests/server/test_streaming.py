"""EventStream by itself: what comes together is sent together, one event each; and nothing stays behind."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import Message

from jaxserve.core.errors import EngineFailed
from jaxserve.server.streaming import DONE, EventStream, event


async def answer(values: AsyncGenerator[Any, None], messages: list[Message]) -> None:
    """Sends a stream to a client that stays. Mutates `messages`: appends what is sent."""

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    response = EventStream(await anext(values), values, {})
    await asyncio.wait_for(response({"type": "http"}, receive, send), 20)


def bodies(messages: list[Message]) -> list[bytes]:
    assert messages[0]["type"] == "http.response.start"
    assert [message["more_body"] for message in messages[1:]] == [True] * (len(messages) - 2) + [False]
    return [message["body"] for message in messages[1:]]


def test_what_comes_together_is_sent_together() -> None:
    messages: list[Message] = []

    async def after(count: int) -> None:
        while len(messages) < 1 + count:
            await asyncio.sleep(0)

    async def values() -> AsyncGenerator[int, None]:
        yield 1
        await after(1)
        yield 2
        yield 3
        await after(2)
        yield 4
        await after(3)
        yield 5

    asyncio.run(answer(values(), messages))
    assert bodies(messages) == [event(1), event(2) + event(3), event(4), event(5) + DONE]


def test_an_error_comes_after_what_was_before_it() -> None:
    async def values() -> AsyncGenerator[int, None]:
        yield 1
        yield 2
        raise EngineFailed("a step raised")

    messages: list[Message] = []
    asyncio.run(answer(values(), messages))
    found = b"".join(bodies(messages))
    assert found.startswith(event(1) + event(2) + b'data: {"error":')
    assert found.endswith(DONE)
    assert b"a step raised" in found
