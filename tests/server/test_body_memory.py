"""The bodies of all requests in progress share a bounded memory, and slow senders are the first to lose their place."""

import asyncio
import contextlib
import gzip
import json
import socket
import time

import httpx
import pytest
from starlette.exceptions import HTTPException

from jaxserve.server.http import body_memory
from jaxserve.server.http.body_memory import SMALL_BODY_BYTES, BodyMemory, HeldBody
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
from tests.server.serving import serving

MEGABYTE = 2**20
JSON = {"content-type": "application/json"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
LARGE = json.dumps({"prompt": "a", "max_tokens": 2, "user": "x" * 900_000}).encode()


@pytest.fixture
def memory(monkeypatch):
    """Return a memory for four bodies of one MiB."""
    monkeypatch.setattr(body_memory, "BODY_MEMORY_BYTES", 0)
    return BodyMemory(MEGABYTE)


async def arrive(body: HeldBody, ends: asyncio.Event) -> None:
    async with body.arriving(60):
        body.resize(MEGABYTE)
        await ends.wait()


def test_oldest_slow_body_makes_room_for_a_new_one(memory, monkeypatch):
    monkeypatch.setattr(body_memory, "SLOW_SECONDS", 0)

    async def main() -> None:
        ends = asyncio.Event()
        bodies = [HeldBody(memory) for _ in range(6)]
        tasks = []
        for body in bodies:
            tasks.append(asyncio.create_task(arrive(body, ends)))
            await asyncio.sleep(0)
        assert [body.size for body in bodies] == [0, 0, *[MEGABYTE] * 4]
        assert memory.used == memory.limit == 4 * MEGABYTE
        ends.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [getattr(result, "status_code", None) for result in results] == [503, 503, None, None, None, None]
        assert not memory.arriving
        for body in bodies:
            body.release()
        assert memory.used == 0

    asyncio.run(main())


def test_body_is_refused_if_the_memory_is_full_of_bodies_that_have_arrived(memory):
    async def main() -> None:
        ends = asyncio.Event()
        ends.set()
        for _ in range(4):
            await arrive(HeldBody(memory), ends)
        late = HeldBody(memory)
        async with late.arriving(60):
            late.resize(SMALL_BODY_BYTES)
            with pytest.raises(HTTPException, match="4194304 bytes"):
                late.resize(SMALL_BODY_BYTES + 1)
        assert memory.used == memory.limit

    asyncio.run(main())


def test_new_body_is_refused_if_no_other_is_slow(memory):
    async def main() -> None:
        ends = asyncio.Event()
        tasks = [asyncio.create_task(arrive(HeldBody(memory), ends)) for _ in range(6)]
        await asyncio.sleep(0)
        ends.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [getattr(result, "status_code", None) for result in results] == [None, None, None, None, 503, 503]
        assert memory.used == memory.limit

    asyncio.run(main())


def test_body_that_is_too_slow_is_not_evicted_but_times_out(memory):
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with HeldBody(memory).arriving(0.01):
                await asyncio.sleep(60)
        assert not memory.arriving

    asyncio.run(main())


def test_unfinished_bodies_do_not_keep_others_from_being_served(monkeypatch):
    monkeypatch.setattr(body_memory, "SLOW_SECONDS", 0.01)
    monkeypatch.setattr(body_memory, "BODY_MEMORY_BYTES", 0)
    with serving(FakeClient(), ServerSettings(max_body_mb=1)) as address, contextlib.ExitStack() as stack:
        slow = []
        for _ in range(8):
            client = stack.enter_context(socket.create_connection((address.host, address.port), timeout=30))
            client.sendall(HEAD + b" " * 999_999)
            slow.append(client)
            time.sleep(0.05)
        for body in (LARGE, b'{"prompt": "a"}'):
            assert httpx.post(f"{address.url}/v1/completions", content=body, headers=JSON).status_code == 200
        answer = slow[0].recv(10_000)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in answer
        # The last one still has its place.
        slow[-1].sendall(b" ")
        assert slow[-1].recv(10_000).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("encoding", [None, "gzip"])
def test_bodies_of_requests_in_progress_are_counted(monkeypatch, encoding):
    monkeypatch.setattr(body_memory, "BODY_MEMORY_BYTES", 0)
    headers = JSON if encoding is None else JSON | {"content-encoding": encoding}
    body = LARGE if encoding is None else gzip.compress(LARGE)

    async def main() -> None:
        with serving(FakeClient(delay=0.5), ServerSettings(max_body_mb=1)) as address:
            async with httpx.AsyncClient(base_url=address.url, timeout=30) as http:
                post = [http.post("/v1/completions", content=body, headers=headers) for _ in range(8)]
                answers = asyncio.gather(*post)
                await asyncio.sleep(0.5)
                small = await http.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}', headers=JSON)
                assert small.status_code == 200
                statuses = sorted(answer.status_code for answer in await answers)
                assert statuses[:4] == [200] * 4
                assert statuses[-1] == 503
                # Afterwards the memory is free again.
                again = await http.post("/v1/completions", content=body, headers=headers)
                assert again.status_code == 200

    asyncio.run(main())
