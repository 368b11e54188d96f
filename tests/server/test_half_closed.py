"""A client that closes its writing half after its request gets the whole answer; one that is gone is noticed."""

import asyncio
import json
import os
import socket
import struct
import time

import pytest

from jaxserve.server.http import connections, half_closed
from jaxserve.server.http.half_closed import BEGINNING, EarlyBeginning
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
from tests.server.serving import serving

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
REQUESTS = {
    "chat": ("/v1/chat/completions", CHAT),
    "completion": ("/v1/completions", {"prompt": "hi"}),
    "several": ("/v1/completions", {"prompt": ["hi", "ho"], "n": 2}),
    "message": ("/v1/messages", CHAT | {"max_tokens": 50}),
    "response": ("/v1/responses", {"input": "hi"}),
    "embedding": ("/v1/embeddings", {"input": "a"}),
    "refused": ("/v1/completions", {"prompt": ""}),
}


def request_of(path: str, body: dict, version: str = "1.1", *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + data


def connect(address) -> socket.socket:
    return socket.create_connection((address.host, address.port), timeout=60)


def answer_after_half_close(address, request: bytes) -> bytes:
    with connect(address) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(65536), b""))


def wait_for(condition, message: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.005)


def without_what_changes(answer: bytes) -> tuple[bytes, int]:
    """Return the first line and the number of bytes after the head, which do not depend on ids and times."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], len(body)


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
def test_whole_answer_arrives(kind, stream, monkeypatch):
    monkeypatch.setattr(half_closed, "CHECK_SECONDS", 0.001)
    monkeypatch.setattr(half_closed, "PROBE_SECONDS", 0.002)  # all bytes of the beginning are sent before the answer
    path, body = REQUESTS[kind]
    if stream and kind not in ("embedding", "refused"):
        body = body | {"stream": True}
    for delay in (0, 0.02):
        with serving(FakeClient(delay=delay, script="abcd")) as address:
            for version, headers in (("1.1", ()), ("1.1", ("Connection: close",)), ("1.0", ())):
                answer = answer_after_half_close(address, request_of(path, body, version, *headers))
                with connect(address) as client:
                    client.sendall(request_of(path, body, version, "Connection: close"))
                    expected = b"".join(iter(lambda connection=client: connection.recv(65536), b""))
                assert without_what_changes(answer) == without_what_changes(expected)
                assert answer.startswith(b"HTTP/1.1 400 " if kind == "refused" else b"HTTP/1.1 200 ")


def test_answer_of_a_request_that_waits_arrives():
    client = FakeClient(gate=asyncio.Event())
    with serving(client) as address, connect(address) as connection:
        connection.sendall(request_of(*REQUESTS["completion"]))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b"H"  # which the client's system would answer with a reset if it were gone
        wait_for(lambda: client.active, "the request never started")
        client.gate.set()
        rest = b"".join(iter(lambda: connection.recv(65536), b""))
    assert rest.startswith(b"TTP/1.1 200 OK\r\n")
    assert json.loads(rest.partition(b"\r\n\r\n")[2])["choices"][0]["finish_reason"] == "length"


def test_every_pipelined_request_is_answered():
    with serving(FakeClient(delay=0.005, script="ab")) as address:
        answer = answer_after_half_close(address, request_of(*REQUESTS["completion"]) * 3)
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert answer.count(b'"finish_reason"') == 3


def test_incomplete_request_and_silent_connection_are_closed():
    with serving(FakeClient()) as address:
        assert answer_after_half_close(address, request_of(*REQUESTS["completion"])[:-1]) == b""
        assert answer_after_half_close(address, b"") == b""


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="only Linux lists open files there")
@pytest.mark.parametrize(
    "second", [b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{", b"?\r\n\r\n"]
)
def test_connection_of_a_client_that_sends_nothing_more_is_not_read_after_its_end(second, monkeypatch):
    monkeypatch.setattr(connections, "LINGER_SECONDS", 1000)
    with serving(FakeClient(script="ab")) as address:
        answer_after_half_close(address, request_of(*REQUESTS["completion"]))
        before = os.listdir("/proc/self/fd")
        answer = answer_after_half_close(address, request_of(*REQUESTS["completion"]) + second)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        wait_for(lambda: len(os.listdir("/proc/self/fd")) <= len(before), "the connection is still open")


def leave_by_close(connection: socket.socket) -> None:
    connection.close()


def leave_by_reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def leave_after_half_close(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(1)
    connection.close()


@pytest.mark.parametrize("leave", [leave_by_close, leave_by_reset, leave_after_half_close])
@pytest.mark.parametrize("stream", [False, True])
def test_client_that_is_gone_is_noticed_before_its_answer(leave, stream, monkeypatch):
    monkeypatch.setattr(half_closed, "PROBE_SECONDS", 0.05)
    client = FakeClient(gate=asyncio.Event())
    settings = ServerSettings(sse_ping_interval=0.1)
    with serving(client, settings) as address:
        connection = connect(address)
        connection.sendall(request_of("/v1/completions", {"prompt": "hi", "stream": stream}))
        wait_for(lambda: client.active, "the request never started")
        leave(connection)
        wait_for(lambda: not client.active, "the request is still in the engine")
        assert client.aborted


class WrittenTo:
    """A transport of one socket that remembers what was written, and whether it was aborted."""

    def __init__(self, connection: socket.socket):
        self.connection, self.written, self.aborted = connection, b"", False

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True

    def get_extra_info(self, name: str) -> object:
        return self.connection


def test_client_that_is_gone_when_its_end_is_read_is_noticed_in_any_order():
    async def beginning_of_answer_to_a_gone_client() -> WrittenTo:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            connection, _ = listener.accept()
        with connection:
            transport = WrittenTo(connection)
            leave_by_reset(client)
            early = EarlyBeginning(transport)
            await asyncio.sleep(0.01)
            assert transport.aborted
            early.cancel()  # as when the connection is lost, which comes before or after a response
            transport.write(BEGINNING + b"200 OK")
            early.cancel()
            return transport

    assert asyncio.run(beginning_of_answer_to_a_gone_client()).written == BEGINNING + b"200 OK"


def test_client_that_leaves_in_the_middle_of_a_stream_is_noticed():
    client = FakeClient(delay=0.005, script="x" * 20_000, max_model_len=100_000)
    with serving(client) as address:
        connection = connect(address)
        connection.sendall(request_of("/v1/completions", {"prompt": "hi", "stream": True, "max_tokens": 20_000}))
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while b"data: " not in received:
            received += connection.recv(1000)
        connection.close()
        wait_for(lambda: not client.active, "the request is still in the engine")
