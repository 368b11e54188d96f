"""Event streams: comments during silence, refusals, disconnects, and events on a single line."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import openai
import pytest

from jaxserve.core.errors import EngineStopped, QueueFull
from jaxserve.server.http.streaming import DONE, PING, EventStream, event
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
from tests.server.serving import serving

SHORT, LONG = 0.001, 3600.0  # seconds between comments


class Exchange:
    """A request, and the messages sent to its client."""

    def __init__(self, ping_interval: float):
        settings = ServerSettings(sse_ping_interval=ping_interval)
        self.app = SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(settings=settings)))
        self.gone = asyncio.Event()
        self.sent: list[dict] = []
        self.news = asyncio.Condition()

    async def receive(self) -> dict:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        async with self.news:
            self.sent.append(message)
            self.news.notify_all()

    async def until(self, count: int, part: bytes) -> None:
        """Wait until a part has been sent `count` times."""
        async with self.news:
            await self.news.wait_for(lambda: self.parts.count(part) >= count)

    @property
    def parts(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]


class Values:
    """A generator that yields the values put into its queue."""

    def __init__(self):
        self.queue: asyncio.Queue = asyncio.Queue()
        self.closed = False

    async def __call__(self):
        try:
            while (value := await self.queue.get()) is not None:
                if isinstance(value, Exception):
                    raise value
                yield value
        finally:
            self.closed = True


def test_comments_are_sent_before_the_first_value_and_between_values():
    async def main():
        exchange, values = Exchange(SHORT), Values()
        stream = await EventStream.start(exchange, values(), {"x-request-id": "r"})
        running = asyncio.ensure_future(stream({}, exchange.receive, exchange.send))
        await exchange.until(3, PING)
        assert set(exchange.parts) == {PING}
        head = exchange.sent[0]
        assert head["status"] == 200
        assert (b"x-request-id", b"r") in head["headers"]
        values.queue.put_nowait({"n": 1})
        await exchange.until(1, event({"n": 1}))
        await exchange.until(exchange.parts.count(PING) + 2, PING)
        values.queue.put_nowait({"n": 2})
        values.queue.put_nowait(None)
        await running
        assert [part for part in exchange.parts if part != PING] == [event({"n": 1}), event({"n": 2}), DONE]
        assert exchange.sent[-1] == {"type": "http.response.body", "body": DONE, "more_body": False}
        assert values.closed

    asyncio.run(main())


def test_values_that_arrive_in_time_need_no_comments():
    async def main():
        exchange, values = Exchange(LONG), Values()
        for value in ({"n": 1}, {"n": 2}, None):
            values.queue.put_nowait(value)
        await (await EventStream.start(exchange, values(), {}))({}, exchange.receive, exchange.send)
        assert exchange.parts == [event({"n": 1}), event({"n": 2}), DONE]

    asyncio.run(main())


def test_early_refusal_has_its_http_status():
    async def main():
        exchange, values = Exchange(LONG), Values()
        values.queue.put_nowait(QueueFull("full"))
        with pytest.raises(QueueFull):
            await EventStream.start(exchange, values(), {})
        assert values.closed

    asyncio.run(main())


def test_refusal_after_a_comment_is_an_event():
    async def main():
        exchange, values = Exchange(SHORT), Values()
        stream = await EventStream.start(exchange, values(), {})
        running = asyncio.ensure_future(stream({}, exchange.receive, exchange.send))
        await exchange.until(1, PING)
        values.queue.put_nowait(EngineStopped("the engine has stopped"))
        await running
        error, done = [part for part in exchange.parts if part != PING]
        assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "the engine has stopped"
        assert done == DONE

    asyncio.run(main())


@pytest.mark.parametrize("ping_interval", [SHORT, LONG])
def test_disconnect_during_silence_closes_the_generator(ping_interval):
    async def main():
        exchange, values = Exchange(ping_interval), Values()
        if ping_interval == SHORT:
            stream = await EventStream.start(exchange, values(), {})
        else:
            values.queue.put_nowait({"n": 1})
            stream = await EventStream.start(exchange, values(), {})
        running = asyncio.ensure_future(stream({}, exchange.receive, exchange.send))
        await exchange.until(1, PING if ping_interval == SHORT else event({"n": 1}))
        exchange.gone.set()
        await running
        assert values.closed
        assert DONE not in exchange.parts

    asyncio.run(main())


def test_openai_client_ignores_comments():
    client = FakeClient(script="abc", delay=0.1)
    with serving(client, ServerSettings(sse_ping_interval=0.005)) as address:
        raw = httpx.post(f"{address.url}/v1/completions", json={"prompt": "a", "stream": True}).text
        assert PING.decode() in raw
        api = openai.OpenAI(base_url=f"{address.url}/v1", api_key="none")
        chunks = api.completions.create(model="fake", prompt="a", stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"


@pytest.mark.parametrize(
    "character", ["\u0085", "\u2028", "\u2029", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r", "\n"]
)
def test_event_is_one_line_for_every_line_iterator(character):
    text = f"a{character}b–…\u200b"
    (line,) = event({"text": text}).decode().strip("\n").splitlines()
    assert json.loads(line.removeprefix("data: ")) == {"text": text}


def test_echoed_line_separators_stay_in_their_event(http):
    body = {"prompt": "a\u2028b\u0085c", "echo": True, "stream": True, "max_tokens": 2}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line and line != "data: [DONE]"]
    assert events[0]["choices"][0]["text"].startswith("a\u2028b\u0085c")
