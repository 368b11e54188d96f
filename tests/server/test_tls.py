"""TLS: certificates, those of clients, their exchange while serving, and clients that never agree on it."""

import contextlib
import logging
import socket
import ssl
import time
from pathlib import Path

import httpx
import pytest

from jaxserve.core.errors import ConfigError
from jaxserve.server.http import connections, tls
from jaxserve.server.http.tls import Certificates
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
from tests.server.identities import Authority, Identity
from tests.server.serving import serving

BODY = {"prompt": "a", "max_tokens": 400}
REQUEST = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture(params=["uvloop", "asyncio"])
def loop(request, monkeypatch) -> str:
    """Serve with each of the event loops that uvicorn chooses from."""
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    monkeypatch.setattr("uvicorn.config.Config.get_loop_factory", factory_of(request.param))
    return request.param


def factory_of(name: str):
    from uvicorn.config import LOOP_FACTORIES
    from uvicorn.importer import import_from_string

    return lambda config: import_from_string(LOOP_FACTORIES[name])(use_subprocess=False)


def settings_of(identity: Identity, **others) -> ServerSettings:
    return ServerSettings(ssl_certfile=identity.certificate, ssl_keyfile=identity.key, **others)


def subject(address, context: ssl.SSLContext) -> str:
    """Return the name in the certificate that a server shows to a new connection."""
    with (
        socket.create_connection((address.host, address.port), 30) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as client,
    ):
        return client.getpeercert()["subject"][0][0][1]


def test_answers_and_streams_arrive_over_tls(loop, authority):
    with serving(FakeClient(script="x" * 200), settings_of(authority.sign("server"))) as address:
        assert address.url.startswith("https://")
        with httpx.Client(base_url=address.url, verify=authority.trusted()) as http:
            assert http.get("/health").json() == {"status": "serving"}
            assert http.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == "x" * 200
            with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
                assert list(answer.iter_lines())[-2] == "data: [DONE]"
            assert http.post("/v1/completions", json={"prompt": "a" * 3_000_000}).status_code == 400


def test_certificate_and_key_may_be_in_one_file(authority):
    identity = authority.sign("server")
    with identity.certificate.open("ab") as file:
        file.write(identity.key.read_bytes())
    with serving(FakeClient(), ServerSettings(ssl_certfile=identity.certificate)) as address:
        assert subject(address, authority.trusted()) == "server"


def test_versions_before_1_2_are_refused(authority):
    old = authority.trusted()
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("DEFAULT:@SECLEVEL=0")  # otherwise this client would refuse by itself
    with serving(FakeClient(), settings_of(authority.sign("server"))) as address, pytest.raises(ssl.SSLError):
        subject(address, old)


def test_early_refusal_reaches_a_client_that_sends_its_whole_body_first(loop, authority):
    settings = settings_of(authority.sign("server"), api_keys=("key",))
    with serving(FakeClient(), settings) as address, httpx.Client(verify=authority.trusted()) as http:
        assert http.post(f"{address.url}/v1/completions", content=b" " * 20_000_000).status_code == 401


def test_clients_without_a_certificate_are_refused_where_it_is_required(authority, tmp_path):
    client = authority.sign("client")
    stranger = Authority(tmp_path / "other" if (tmp_path / "other").mkdir() is None else tmp_path).sign("client")
    settings = settings_of(authority.sign("server"), ssl_ca_certs=authority.certificates, ssl_cert_reqs=2)
    with serving(FakeClient(), settings) as address:
        for identity, accepted in ((client, True), (stranger, False), (None, False)):
            context = authority.trusted()
            if identity is not None:
                context.load_cert_chain(identity.certificate, identity.key)
            with httpx.Client(verify=context) as http:
                if accepted:
                    assert http.get(f"{address.url}/health").status_code == 200
                else:
                    with pytest.raises(httpx.TransportError):
                        http.get(f"{address.url}/health")


# -- exchange of the files


def test_new_connections_get_the_new_certificate_and_open_ones_go_on(authority, monkeypatch):
    monkeypatch.setattr(tls, "CHECK_SECONDS", 0.01)
    identity = authority.sign("server")
    with serving(FakeClient(), settings_of(identity)) as address, httpx.Client(verify=authority.trusted()) as http:
        assert http.get(f"{address.url}/health").status_code == 200
        renewed = authority.sign("renewed")
        renewed.key.replace(identity.key)
        renewed.certificate.replace(identity.certificate)
        wait_for(lambda: subject(address, authority.trusted()) == "renewed")
        with http.stream("GET", f"{address.url}/health") as answer:
            shown = answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()
        assert shown["subject"][0][0][1] == "server"  # on the first connection


def test_broken_pair_keeps_the_earlier_one_and_is_told_once(authority, caplog):
    identity = authority.sign("server")
    found = Certificates(settings_of(identity))
    before = found.context
    identity.certificate.write_text("broken")
    for _ in range(3):
        found.refresh()
    assert found.context is before
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "new connections still get the earlier certificate: "
        f"{identity.certificate} holds no certificate in PEM format (--ssl-certfile)"
    ]
    authority.sign("server")
    found.refresh()
    assert found.context is not before


def test_certificate_without_its_key_waits_for_it(authority, caplog):
    identity = authority.sign("server")
    found = Certificates(settings_of(identity))
    before, key = found.context, identity.key.read_bytes()
    authority.sign("server")
    new, _ = identity.key.read_bytes(), identity.key.write_bytes(key)
    found.refresh()
    assert found.context is before
    assert "is not the key of the certificate" in caplog.text
    identity.key.write_bytes(new)
    found.refresh()
    assert found.context is not before


# -- files that cannot be used


def test_errors_name_the_option_and_the_file(authority, tmp_path):
    identity, other = authority.sign("server"), authority.sign("other")
    broken, missing = tmp_path / "broken.pem", tmp_path / "missing.pem"
    broken.write_text("no certificate")
    pair = {"ssl_certfile": identity.certificate, "ssl_keyfile": identity.key}
    clients = {"ssl_cert_reqs": 1}
    for changes, file, words in (
        ({"ssl_certfile": missing}, missing, "No such file or directory (--ssl-certfile)"),
        ({"ssl_keyfile": missing}, missing, "No such file or directory (--ssl-keyfile)"),
        ({"ssl_ca_certs": missing, **clients}, missing, "No such file or directory (--ssl-ca-certs)"),
        ({"ssl_certfile": broken}, broken, "holds no certificate in PEM format (--ssl-certfile)"),
        ({"ssl_ca_certs": broken, **clients}, broken, "holds no certificate in PEM format (--ssl-ca-certs)"),
        ({"ssl_keyfile": broken}, broken, "holds no private key in PEM format (--ssl-keyfile)"),
        ({"ssl_keyfile": None}, identity.certificate, "holds no private key in PEM format (--ssl-keyfile)"),
        ({"ssl_keyfile": other.key}, other.key, f"not the key of the certificate in {identity.certificate}"),
        ({"ssl_certfile": tmp_path}, tmp_path, "Is a directory (--ssl-certfile)"),
    ):
        with pytest.raises(ConfigError) as error:
            Certificates(ServerSettings(**pair | changes))
        assert str(error.value).startswith(str(file))
        assert words in str(error.value)


def test_encrypted_key_needs_its_password(authority):
    identity = authority.sign("server", b"secret")
    assert Certificates(settings_of(identity, ssl_keyfile_password="secret")).context
    for password, words in ((None, "JAXSERVE_SSL_KEYFILE_PASSWORD"), ("wrong", "--ssl-keyfile")):
        with pytest.raises(ConfigError, match=words) as error:
            Certificates(settings_of(identity, ssl_keyfile_password=password))
        assert "wrong" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ssl_keyfile": "key.pem"}, "--ssl-certfile"),
        ({"ssl_cert_reqs": 2}, "--ssl-certfile"),
        ({"ssl_certfile": "a.pem", "ssl_cert_reqs": 2}, "--ssl-ca-certs"),
        ({"ssl_certfile": "a.pem", "ssl_ca_certs": "b.pem"}, "--ssl-cert-reqs"),
        ({"ssl_certfile": "a.pem", "ssl_cert_reqs": 3}, "ssl_cert_reqs"),
        ({"ssl_certfile": "a.pem", "uds": "s"}, "--uds"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        ServerSettings(**options)


# -- clients that do not agree


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"])
def test_client_that_stops_in_the_handshake_is_closed(loop, authority, monkeypatch, caplog, sent):
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.05)
    with serving(FakeClient(), settings_of(authority.sign("server"))) as address:
        with socket.create_connection((address.host, address.port), 30) as client:
            client.sendall(sent)
            with contextlib.suppress(ConnectionError):
                assert client.recv(1000) == b""
        assert subject(address, authority.trusted()) == "server"
    assert caplog.text == ""


@pytest.mark.parametrize("sent", [REQUEST, b"\x16\x03\x01\x00\x05hello", b"\x00" * 1000])
def test_client_that_does_not_speak_tls_is_closed_at_once(loop, authority, caplog, sent):
    with serving(FakeClient(), settings_of(authority.sign("server"), header_timeout=3600)) as address:
        with socket.create_connection((address.host, address.port), 5) as client:
            client.sendall(sent)
            with contextlib.suppress(ConnectionError):
                while client.recv(1000):  # an alert of TLS may come first
                    pass
        assert subject(address, authority.trusted()) == "server"
    assert caplog.text == ""


def test_silent_connections_above_the_limit_make_room_for_others(loop, authority, monkeypatch):
    monkeypatch.setattr("jaxserve.server.http.open_files.max_connections", lambda: 2)
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0)
    with serving(FakeClient(), settings_of(authority.sign("server"))) as address, contextlib.ExitStack() as silent:
        clients = [silent.enter_context(socket.create_connection((address.host, address.port), 30)) for _ in range(8)]
        with httpx.Client(base_url=address.url, verify=authority.trusted()) as http:
            assert http.get("/v1/models").status_code == 200
        with contextlib.suppress(ConnectionError):
            assert clients[0].recv(1000) == b""


def test_server_ends_although_clients_are_idle_or_in_the_handshake(loop, authority, caplog):
    context = authority.trusted()
    with contextlib.ExitStack() as open_, serving(FakeClient(), settings_of(authority.sign("server"))) as address:
        open_.enter_context(socket.create_connection((address.host, address.port), 30))
        plain = open_.enter_context(socket.create_connection((address.host, address.port), 30))
        idle = open_.enter_context(context.wrap_socket(plain, server_hostname="localhost"))
        idle.sendall(REQUEST)
        assert idle.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert "timeout" not in caplog.text


def test_client_that_closes_its_half_over_tls_ends_its_request(loop, authority):
    client, body = FakeClient(delay=3600, delay_after=1), b'{"prompt": "a"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 15"
    with (
        serving(client, settings_of(authority.sign("server"))) as address,
        socket.create_connection((address.host, address.port), 30) as plain,
        authority.trusted().wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        secured.sendall(head + b"\r\n\r\n" + body)
        wait_for(lambda: client.active)
        secured.unwrap().shutdown(socket.SHUT_WR)
        wait_for(lambda: client.aborted)
