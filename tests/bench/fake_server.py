"""A server that follows a script, byte by byte, and records times."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass
class Exchange:
    """One request as the server received it, and the connection on which a script answers it."""

    writer: asyncio.StreamWriter
    index: int
    connection: int
    path: str
    headers: dict[str, str]
    body: Any
    written_s: list[float] = field(default_factory=list)  # of the events with tokens

    async def head(self, status: int = 200, **headers: str) -> None:
        """Status and headers of a chunked body."""
        lines = [f"HTTP/1.1 {status} Status", "transfer-encoding: chunked", *(f"{k}: {v}" for k, v in headers.items())]
        await self.raw("\r\n".join(lines).encode() + b"\r\n\r\n")

    async def raw(self, data: bytes) -> None:
        """Bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def part(self, data: bytes) -> None:
        """One chunk of the body."""
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, value: Any) -> None:
        """One server-sent event."""
        await self.part(b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n")

    async def token(self, text: str = "x", finish_reason: str | None = None) -> None:
        """A completion's chunk; notes when it was written."""
        self.written_s.append(time.monotonic())
        await self.event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})

    async def delta(self, **delta: Any) -> None:
        """A chat's chunk."""
        await self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

    async def usage(self, prompt_tokens: int, completion_tokens: int) -> None:
        """The last chunk with include_usage."""
        await self.event(
            {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}}
        )

    async def done(self) -> None:
        """The end of the stream and of the body."""
        await self.event(b"[DONE]")
        await self.end()

    async def end(self) -> None:
        """The end of the body."""
        await self.part(b"")

    async def whole(self, status: int, body: bytes) -> None:
        """A response in one piece."""
        await self.raw(b"HTTP/1.1 %d Status\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)

    def reset(self) -> None:
        """Breaks the connection off."""
        self.writer.transport.abort()


Script = Callable[[Exchange], Awaitable[None]]


class FakeServer:
    """Listens on 127.0.0.1 while inside; `script` answers every request."""

    def __init__(self, script: Script):
        self._script = script
        self.exchanges: list[Exchange] = []
        self.connections = 0
        self._open: set[asyncio.Task] = set()

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self._server.sockets[0].getsockname()[:2])

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(task := asyncio.current_task())
        task.add_done_callback(self._open.discard)
        connection, self.connections = self.connections, self.connections + 1
        try:
            async for path, headers, body in _requests(reader):
                exchange = Exchange(writer, len(self.exchanges), connection, path, headers, body)
                self.exchanges.append(exchange)
                await self._script(exchange)
        except ConnectionError:
            pass  # the client went away
        except asyncio.CancelledError:
            pass  # the test is over; raised on, the streams of asyncio would log it
        finally:
            with contextlib.suppress(ConnectionError):
                writer.close()


async def _requests(reader: asyncio.StreamReader) -> AsyncIterator[tuple[str, dict[str, str], Any]]:
    """The requests on one connection until it is closed."""
    while True:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        except asyncio.IncompleteReadError:
            return
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        yield head[0].split()[1], headers, json.loads(body) if body else None


async def answer(exchange: Exchange, tokens: int = 3, every_s: float = 0.0, first_s: float = 0.0) -> None:
    """A whole answer: `tokens` chunks, the first after `first_s`, the others `every_s` apart, then usage."""
    await exchange.head()
    for index in range(tokens):
        await asyncio.sleep(every_s if index else first_s)
        await exchange.token(finish_reason="length" if index == tokens - 1 else None)
    await exchange.usage(prompt_tokens=7, completion_tokens=tokens)
    await exchange.done()
