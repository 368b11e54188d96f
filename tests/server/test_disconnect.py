"""A disconnecting client aborts its requests in every phase."""

import asyncio
import json
import socket
import threading
import time

import pytest

from tests.server.fake import FakeClient
from tests.server.serving import serving

BODIES = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "several choices": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 3}),
    "message": ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}),
    "response": ("/v1/responses", {"input": "hi"}),
    "completion": ("/v1/completions", {"prompt": "hi"}),
    "several prompts": ("/v1/completions", {"prompt": ["hi", "ho"]}),
    "embedding": ("/v1/embeddings", {"input": ["a", "b"]}),
    "scores": ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
}
EMBEDDED = ("embedding", "scores")


class SlowClient(FakeClient):
    """A fake engine that generates `free` tokens over all requests and then waits for ever."""

    def __init__(self, free: int):
        super().__init__()
        self.free = free
        self.turns = 0
        self.waiting = threading.Event()

    async def _turn(self, count: int) -> None:
        self.turns += 1
        if self.turns > self.free:
            self.waiting.set()
            await asyncio.Event().wait()
        await super()._turn(count)


def wait_for(condition, message: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.005)


def send(address, path: str, body: dict):
    data = json.dumps(body).encode()
    connection = socket.create_connection((address.host, address.port), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("free", [0, 3])
def test_disconnect_aborts_the_request(kind, stream, free):
    path, body = BODIES[kind]
    client = SlowClient(free)
    with serving(client) as address:
        connection = send(address, path, body | ({"stream": True} if stream and kind not in EMBEDDED else {}))
        if kind not in EMBEDDED or free == 0:
            assert client.waiting.wait(20)
            assert client.active
        connection.close()
        wait_for(lambda: not client.active, "the request is still in the engine")


def test_disconnect_of_a_client_that_does_not_read_aborts_its_request():
    client = FakeClient(script="x" * 400_000, max_model_len=1_000_000)
    with serving(client) as address:
        connection = send(address, "/v1/completions", {"prompt": "hi", "stream": True, "max_tokens": 400_000})
        connection.recv(1000)
        wait_for(lambda: client.active, "the request never started")
        connection.close()
        wait_for(lambda: not client.active, "the request is still in the engine")
        assert client.aborted


def test_refused_prompt_aborts_other_prompts_of_its_request():
    client = FakeClient(capacity=2, gate=asyncio.Event())
    with serving(client) as address:
        connection = send(address, "/v1/completions", {"prompt": ["a", "b", "c"]})
        assert connection.recv(1000).startswith(b"HTTP/1.1 503 ")
        connection.close()
        wait_for(lambda: not client.active, "the other prompts are still in the engine")
