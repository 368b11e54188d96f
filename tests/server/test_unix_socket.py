"""Unix sockets: their files, who may connect, and what a server takes for its own machine."""

import signal
import socket
import stat
from pathlib import Path

import httpx
import pytest

from jaxserve.core.errors import ConfigError
from jaxserve.server.http.auth import sender_of
from jaxserve.server.http.listening import listen_on_file, urls
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
from tests.server.fake_control import FIRST, FakeControl
from tests.server.process import server_process
from tests.server.serving import serving

SERVE = """
from jaxserve.server.runner import run_server
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
client = lambda: FakeClient(script="x" * 400, delay=3600, delay_after=3)
run_server(client, ServerSettings(uds={path!r}), lambda urls, client: print(*urls, flush=True))
"""
BODY = {"prompt": "a", "stream": True, "max_tokens": 400}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "server.sock"


def connected(path: Path) -> httpx.Client:
    return httpx.Client(base_url="http://localhost", transport=httpx.HTTPTransport(uds=str(path)), timeout=30)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_answers_and_streams_arrive_by_a_socket(path):
    with serving(FakeClient(script="x" * 50), ServerSettings(uds=path)), connected(path) as http:
        assert http.get("/health").json() == {"status": "serving"}
        with http.stream("POST", "/v1/completions", json=BODY) as answer:
            assert list(answer.iter_lines())[-2] == "data: [DONE]"


def test_client_that_closes_its_half_gets_its_answer(path):
    with serving(FakeClient(delay=0.05), ServerSettings(uds=path)), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n"
        )
        client.sendall(head + b'{"prompt": "a"}')
        client.shutdown(socket.SHUT_WR)
        with client.makefile("rb") as answer:
            assert answer.read().startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("options", "expected"), [({}, 0o600), ({"uds_mode": "660"}, 0o660), ({"uds_mode": "0666"}, 0o666)]
)
def test_socket_has_the_permissions_of_the_option(path, options, expected):
    settings = ServerSettings(uds=path, **options)
    with listen_on_file(str(path), settings.socket_mode) as listener:
        assert mode(path) == expected
        assert urls([listener]) == [f"unix:{path}"]


@pytest.mark.parametrize("mode", ["", "rw", "9", "888", "7777", "0o600"])
def test_permissions_that_are_not_octal_are_refused(mode):
    with pytest.raises(ConfigError, match="--uds-mode"):
        ServerSettings(uds="x", uds_mode=mode)


def test_file_of_a_server_that_was_killed_is_replaced(path):
    with listen_on_file(str(path), 0o600):
        pass
    assert path.is_socket()
    with serving(FakeClient(), ServerSettings(uds=path)), connected(path) as http:
        assert http.get("/health").status_code == 200


def test_socket_of_a_running_server_is_refused_and_stays(path):
    with serving(FakeClient(), ServerSettings(uds=path)):
        with pytest.raises(ConfigError, match=r"another server listens there \(--uds\)"):
            listen_on_file(str(path), 0o600)
        with connected(path) as http:
            assert http.get("/health").status_code == 200


def test_paths_that_no_socket_can_have_are_refused(path, tmp_path):
    path.write_text("precious")
    link, nowhere = tmp_path / "link", tmp_path / "nowhere" / "server.sock"
    link.symlink_to(path)
    for found, words in (
        (path, "no socket"),
        (link, "no socket"),
        (tmp_path, "no socket"),
        (nowhere, "No such file or directory"),
        (tmp_path / ("x" * 108), "too long"),
    ):
        with pytest.raises(ConfigError, match=words) as error:
            listen_on_file(str(found), 0o600)
        assert str(error.value).startswith(f"cannot listen on {found}: ")
        assert str(error.value).endswith("(--uds)")
    assert path.read_text() == "precious"


def test_socket_is_removed_after_the_first_signal(path):
    with server_process("-c", SERVE.format(path=str(path))) as server:
        assert server.url == f"unix:{path}"
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    assert not path.exists()


def test_socket_is_removed_after_the_second_signal(path):
    with (
        server_process("-c", SERVE.format(path=str(path))) as server,
        connected(path) as http,
        http.stream("POST", "/v1/completions", json=BODY) as answer,
    ):
        lines = answer.iter_lines()  # which would close the connection if it were dropped
        next(lines)
        server.signal(signal.SIGTERM)
        while http.get("/health").json()["status"] != "draining":
            pass
        server.signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM
    assert not path.exists()


# -- who is on the other side


@pytest.mark.parametrize(
    ("options", "host", "status"),
    [
        ({}, "localhost", 200),
        ({}, "proxy.example", 403),
        ({"uds_mode": "660"}, "localhost", 403),
        ({"api_keys": ("key",)}, "localhost", 403),
        ({"admin_key": "key"}, "localhost", 401),
    ],
)
def test_operators_need_a_key_unless_the_server_has_the_socket_for_itself(path, options, host, status):
    client = FakeClient(control=FakeControl(lambda: float(FIRST)))
    with serving(client, ServerSettings(uds=path, **options)), connected(path) as http:
        assert http.get("/admin/status", headers={"host": host}).status_code == status


def test_clients_of_a_socket_are_one_sender():
    scope = {"type": "http", "client": None, "headers": []}
    assert sender_of(scope, ()) == sender_of(dict(scope), ("key",)) != ""
