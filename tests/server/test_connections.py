"""Connections: early refusals, timeouts, the limit of open files, and bodies in many pieces."""

import asyncio
import contextlib
import errno
import json
import os
import resource
import socket
import threading
import time

import httpx
import pytest

from jaxserve.server.http import connections, open_files
from jaxserve.server.http.connections import Connections
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
from tests.server.serving import raw_request, serving

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def connect(address) -> socket.socket:
    return socket.create_connection((address.host, address.port), timeout=30)


def answer_to_ready(client: socket.socket) -> bytes:
    """Request /ready and return the whole answer."""
    client.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        part = client.recv(10_000)
        assert part
        answer += part
    return answer


def send_for_ever(client: socket.socket, data: bytes) -> None:
    while True:
        client.sendall(data)
        time.sleep(0.001)


def error_in(answer: bytes) -> dict:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return json.loads(body)["error"]


# closing while the client sends


@pytest.mark.parametrize("megabytes", [1, 5, 40])
@pytest.mark.parametrize(
    ("settings", "status"), [({"api_keys": ("key",)}, b"401"), ({"max_body_mb": 0.5}, b"413")], ids=["key", "size"]
)
def test_early_refusal_reaches_a_client_that_sends_its_whole_body_first(settings, status, megabytes):
    size = megabytes * 2**20
    with serving(FakeClient(), ServerSettings(**settings)) as address:
        answer = raw_request(address, POST + b"Content-Length: %d" % size, b" " * size)
    assert answer.startswith(b"HTTP/1.1 %s " % status)
    assert error_in(answer)["message"]
    assert b"connection: close" in answer


def test_early_refusal_reaches_a_client_that_sends_chunks_first():
    chunks = (b"100000\r\n" + b" " * 2**20 + b"\r\n") * 8 + b"0\r\n\r\n"
    with serving(FakeClient(), ServerSettings(max_body_mb=1)) as address:
        answer = raw_request(address, POST + b"Transfer-Encoding: chunked", chunks)
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_too_long_head_is_answered_with_an_error(address):
    answer = raw_request(address, b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 2_000_000)
    assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert error_in(answer)["message"] == "the head of the request has more than 65536 bytes, which is the limit"
    assert error_in(answer)["code"] == "head_too_large"


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"GET /health HTTP/1.1", "Missing mandatory Host: header"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: -1", "bad Content-Length"),
        (b"GET /health", "illegal request line"),
        (POST + b"Transfer-Encoding: gzip", "Only Transfer-Encoding: chunked is supported"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nxyz", "illegal chunk header"),
    ],
)
def test_invalid_http_is_refused_with_the_reason(address, head, reason):
    answer = raw_request(address, head)
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n") or answer.startswith(b"HTTP/1.1 501 ")
    assert "not a valid HTTP request: " in error_in(answer)["message"]
    assert reason in error_in(answer)["message"]


def test_tls_to_a_plain_server_is_named(address):
    answer = raw_request(address, b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + b"a" * 100)
    assert "the server speaks plain HTTP" in error_in(answer)["message"]


def test_lingering_ends_after_its_time(monkeypatch):
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.05)
    with serving(FakeClient(), ServerSettings(api_keys=("key",))) as address, connect(address) as client:
        client.sendall(POST + b"Content-Length: 1000000000\r\n\r\n")
        with pytest.raises(ConnectionError):
            send_for_ever(client, b" " * 1000)


def test_lingering_reads_a_bounded_number_of_bytes(monkeypatch):
    monkeypatch.setattr(connections, "LINGER_BYTES", 2**20)
    with serving(FakeClient(), ServerSettings(api_keys=("key",))) as address, connect(address) as client:
        client.sendall(POST + b"Content-Length: 1000000000\r\n\r\n")
        with pytest.raises(ConnectionError):
            send_for_ever(client, b" " * 2**20)


# silence


def test_connection_without_a_request_is_closed_after_header_timeout():
    with serving(FakeClient(), ServerSettings(header_timeout=0.05)) as address, connect(address) as client:
        assert client.recv(1000) == b""


def test_incomplete_head_returns_408_even_if_bytes_keep_arriving():
    with serving(FakeClient(), ServerSettings(header_timeout=0.1)) as address, connect(address) as client:
        client.sendall(POST + b"Content-")
        client.setblocking(False)
        answer = b""
        while not answer:
            client.send(b"a")
            time.sleep(0.005)
            with contextlib.suppress(BlockingIOError):
                answer = client.recv(10_000)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert "--header-timeout" in error_in(answer)["message"]


def test_incomplete_head_of_a_second_request_closes_the_connection():
    with serving(FakeClient(), ServerSettings(header_timeout=0.1)) as address, connect(address) as client:
        assert answer_to_ready(client).startswith(b"HTTP/1.1 200 ")
        client.sendall(b"GET /ready HT")
        assert client.recv(10_000).startswith(b"HTTP/1.1 408 ")


def test_header_timeout_ends_neither_requests_nor_idle_connections():
    client = FakeClient(script="ab", delay=0.08)
    with serving(client, ServerSettings(header_timeout=0.05)) as address, httpx.Client(base_url=address.url) as http:
        for _ in range(2):
            answer = http.post("/v1/completions", json={"prompt": "a"})
            assert answer.json()["choices"][0]["text"] == "ab"
            assert answer.headers["keep-alive"] == "timeout=120"
            time.sleep(0.1)


def test_idle_connection_stays_open_for_keep_alive_timeout():
    assert ServerSettings().keep_alive_timeout > 90  # longer than proxies and clients keep connections
    settings = ServerSettings(keep_alive_timeout=0.05)
    with serving(FakeClient(), settings) as address, connect(address) as client:
        assert answer_to_ready(client).startswith(b"HTTP/1.1 200 ")
        assert client.recv(10_000) == b""


# the limit of open files


class Idle:
    def __init__(self):
        self.closed = False

    def close_idle(self):
        self.closed = True


def test_connection_above_the_limit_closes_the_oldest_idle_one(caplog):
    shared = Connections(header_timeout=30, limit=2)
    old, new = Idle(), Idle()
    shared.idle = {old: 0.0, new: 0.5}
    assert shared.admit(2, now=10.0)
    assert not old.closed
    assert not caplog.records
    assert shared.admit(3, now=10.0)
    assert (old.closed, new.closed) == (True, False)
    assert shared.admit(3, now=10.0)
    assert new.closed
    assert not shared.admit(3, now=11.0)  # all have requests in flight
    assert len(caplog.records) == 1  # for three refusals
    assert "the limit is 2" in caplog.text


def test_new_idle_connection_is_not_closed_for_another():
    shared = Connections(header_timeout=30, limit=1)
    fresh = Idle()
    shared.idle = {fresh: 10.0}
    assert not shared.admit(2, now=10.5)
    assert not fresh.closed


def test_connection_above_the_limit_gets_503_except_for_probes(monkeypatch):
    monkeypatch.setattr(open_files, "max_connections", lambda: 2)
    client = FakeClient(gate=asyncio.Event())
    body = b'{"prompt": "a"}'
    with serving(client) as address, connect(address) as first, connect(address) as second:
        for connection in (first, second):
            connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        while len(client.active) < 2:
            time.sleep(0.005)
        answer = httpx.get(f"{address.url}/v1/models")
        assert answer.status_code == 503
        assert "too many connections" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"] == "1"
        assert httpx.get(f"{address.url}/health").status_code == 200


def test_silent_connections_are_closed_for_new_ones(monkeypatch):
    monkeypatch.setattr(open_files, "max_connections", lambda: 2)
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0)
    with serving(FakeClient()) as address, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(address)) for _ in range(5)]
        assert httpx.get(f"{address.url}/v1/models").status_code == 200
        assert silent[0].recv(1000) == b""


def test_silent_connections_that_arrive_at_once_are_closed_when_no_file_is_left(monkeypatch):
    monkeypatch.setattr(open_files, "max_connections", lambda: 4)
    monkeypatch.setattr(connections, "SURPLUS_IDLE_SECONDS", 60)
    servers, start = [], connections.HttpServer.startup

    async def startup(server, sockets=None):
        servers.append(server)
        await start(server, sockets)

    monkeypatch.setattr(connections.HttpServer, "startup", startup)
    with serving(FakeClient()) as address, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(contextlib.closing(connect(address))) for _ in range(10)]
        late = stack.enter_context(contextlib.closing(connect(address)))
        assert b"200 OK" in answer_to_ready(late)  # all are open
        (server,) = servers
        monkeypatch.setattr(connections, "SURPLUS_IDLE_SECONDS", 0)
        full = OSError(errno.EMFILE, "Too many open files")
        server.servers[0]._loop.call_soon_threadsafe(server.servers[0]._pause_accepting, full)
        # The connections above the limit; the others are still served.
        for client in silent[4:]:
            assert client.recv(1) == b""
        for client in (*silent[:4], connect(address)):
            assert b"200 OK" in answer_to_ready(client)


def test_raise_limit_raises_the_soft_limit_of_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard // 2), hard))
        open_files.raise_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert open_files.max_connections() >= hard - open_files.RESERVED
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_low_limit_of_open_files_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(open_files, "max_connections", lambda: 896)
    open_files.warn_if_few(896)
    assert not caplog.records
    open_files.warn_if_few(1024)
    assert "896 connections" in caplog.text
    assert "ulimit -n" in caplog.text


class Listener:
    """A listening socket whose first `failures` calls of accept find no file descriptor."""

    def __init__(self, listener: socket.socket, failures: int):
        self._listener = listener
        self._failures = failures

    def __getattr__(self, name):
        return getattr(self._listener, name)

    def accept(self):
        if self._failures > 0:
            self._failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._listener.accept()


def test_connections_wait_while_no_file_descriptor_is_left(monkeypatch, caplog):
    monkeypatch.setattr(connections, "ACCEPT_PAUSE", 0.001)
    accept = connections.Acceptor._accept
    served = []

    def accept_late(acceptor):
        if not served:
            served.append(acceptor)
            acceptor._listener = Listener(acceptor._listener, failures=3)
        accept(acceptor)

    monkeypatch.setattr(connections.Acceptor, "_accept", accept_late)
    monkeypatch.setattr(Listener, "fileno", lambda self: self._listener.fileno(), raising=False)
    with serving(FakeClient()) as address:
        assert httpx.get(f"{address.url}/health").status_code == 200
    assert [record.levelname for record in caplog.records if "Too many open files" in record.getMessage()] == ["ERROR"]


# many small pieces


def test_large_and_chunked_bodies_are_parsed_in_slices(monkeypatch):
    slices = []
    take = connections.HttpProtocol._parse
    monkeypatch.setattr(
        connections.HttpProtocol, "_parse", lambda protocol, data: slices.append(len(data)) or take(protocol, data)
    )
    body = json.dumps({"prompt": "a", "user": "x" * 1_000_000}).encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[i : i + 7] for i in range(0, len(body), 7)))
    with serving(FakeClient()) as address:
        head = POST + b"Connection: close\r\n"
        assert raw_request(address, head + b"Content-Length: %d" % len(body), body).startswith(b"HTTP/1.1 200 ")
        answer = raw_request(address, head + b"Transfer-Encoding: chunked", chunks + b"0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
    assert max(slices) <= connections.SLICE_BYTES
    assert sum(slices) > len(body) + len(chunks)


def test_pipelined_requests_are_answered_in_order_and_wait_outside_the_parser(monkeypatch):
    ahead = []
    take = connections.HttpProtocol._parse

    def watched(protocol, data):
        take(protocol, data)
        ahead.append(len(protocol.conn.trailing_data[0]))

    monkeypatch.setattr(connections.HttpProtocol, "_parse", watched)
    count = 5000
    requests = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * count
    answers = b""
    with serving(FakeClient()) as address, connect(address) as client:
        sender = threading.Thread(target=client.sendall, args=(requests,))
        sender.start()
        while answers.count(b"HTTP/1.1 200 OK") < count:
            answers += client.recv(1_000_000)
        sender.join()
    assert answers.count(b"HTTP/1.1 ") == count
    assert max(ahead) <= 2 * connections.SLICE_BYTES


def test_access_log_has_the_address_of_the_client(caplog):
    with caplog.at_level("INFO", logger="uvicorn.access"), serving(FakeClient(), ServerSettings(access_log=True)) as at:
        assert httpx.get(f"{at.url}/health").status_code == 200
    assert "127.0.0.1:" in caplog.text
    assert '"GET /health HTTP/1.1" 200' in caplog.text
