"""Clients of this package by https and by Unix sockets: `jaxserve plan`, `jaxserve bench`, and the printed command."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxserve.bench.client import Client, Target
from jaxserve.bench.options import ServerOptions
from jaxserve.bench.record import RequestRecord
from jaxserve.bench.sampler import MetricsSampler
from jaxserve.bench.server import discover
from jaxserve.bench.spawn import READY
from jaxserve.bench.workload import Sample
from jaxserve.cli.main import _print_ready, app
from jaxserve.core.errors import ConfigError
from jaxserve.core.server_address import ServerAddress
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
from tests.server.fake_control import FIRST, FakeControl
from tests.server.identities import Authority
from tests.server.serving import serving


@pytest.fixture(params=["http", "https", "unix"])
def reached(request, tmp_path: Path, monkeypatch):
    """Serve, and yield the address that clients get, and the settings."""
    client = FakeClient(control=FakeControl(lambda: float(FIRST)))
    if request.param == "unix":
        settings = ServerSettings(uds=tmp_path / "with space.sock")
    elif request.param == "https":
        authority = Authority(tmp_path)
        identity = authority.sign("server")
        settings = ServerSettings(ssl_certfile=identity.certificate, ssl_keyfile=identity.key)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificates))
    else:
        settings = ServerSettings()
    with serving(client, settings) as address:
        yield f"unix:{settings.uds}" if settings.uds else address.url, settings


def test_plan_is_shown(reached):
    done = CliRunner().invoke(app, ["plan", "show", "--format", "json", "--url", reached[0]])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["instances"]


def test_no_proxy_is_asked_for_this_machine(reached, monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nothing listens
    test_plan_is_shown(reached)
    test_benchmark_finds_the_model_sends_requests_and_reads_metrics(reached)


def test_benchmark_finds_the_model_sends_requests_and_reads_metrics(reached):
    url, record = reached[0], RequestRecord(0, 0.0, 0.0, input_tokens=1)
    assert discover(url, ServerOptions()).name == "fake"

    async def measure() -> MetricsSampler:
        async with MetricsSampler(url, 0.01) as sampler, Client(Target(url, "fake")) as client:
            await client.send(Sample("a", 5, 1), record)
        return sampler

    sampler = asyncio.run(measure())
    assert (record.status, record.error) == (200, None)
    assert sampler._first is not None


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_command_that_the_server_prints_works(reached, capsys):
    url, settings = reached
    _print_ready([url], FakeClient(), settings)
    ready, command, *rest = capsys.readouterr().out.splitlines()
    assert f" at {url} (" in ready
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60)
    assert json.loads(done.stdout)["choices"], done.stderr
    pages = [f"chat: {url}/", f"dashboard: {url}/dashboard"]
    assert [line for line in rest if line in pages] == ([] if settings.uds else pages)


def test_spawned_server_is_found_at_each_kind_of_address():
    for url in ("http://127.0.0.1:80", "https://[::1]:80", "unix:/run/jaxserve.sock"):
        assert READY.search(f"jaxserve is ready: m at {url} (9 tokens of context)\n")[1] == url


def test_certificate_of_an_unknown_authority_is_refused_with_a_hint(tmp_path, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    identity = Authority(tmp_path).sign("server")
    with serving(FakeClient(), ServerSettings(ssl_certfile=identity.certificate, ssl_keyfile=identity.key)) as address:
        done = CliRunner().invoke(app, ["plan", "show", "--url", address.url])
        assert done.exit_code == 1
        assert "SSL_CERT_FILE" in done.stderr
        with pytest.raises(ConfigError, match="SSL_CERT_FILE"):
            discover(address.url, ServerOptions())


@pytest.mark.parametrize("tls", [True, False])
def test_address_with_the_scheme_of_the_other_protocol_is_refused_with_a_hint(tls, tmp_path):
    identity = Authority(tmp_path).sign("server")
    files = {"ssl_certfile": identity.certificate, "ssl_keyfile": identity.key} if tls else {}
    with serving(FakeClient(), ServerSettings(**files)) as address:
        scheme, other = ("https", "http") if tls else ("http", "https")
        url = address.url.replace(f"{scheme}://", f"{other}://")
        done = CliRunner().invoke(app, ["plan", "show", "--url", url])
        assert done.exit_code == 1
        assert f"{scheme}://" in done.stderr.removeprefix(f"jaxserve: cannot reach {url}")
        with pytest.raises(ConfigError, match=f"TLS.* {scheme}://"):
            discover(url, ServerOptions())


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://127.0.0.1:8000/", ServerAddress("http://127.0.0.1:8000")),
        ("unix:/run/x.sock", ServerAddress("http://localhost", "/run/x.sock")),
        ("unix:///run/x.sock", ServerAddress("http://localhost", "/run/x.sock")),
        ("unix:x.sock", ServerAddress("http://localhost", "x.sock")),
    ],
)
def test_texts_of_addresses(text, address):
    assert ServerAddress.parse(text) == address


def test_unix_socket_without_a_path_is_refused():
    with pytest.raises(ConfigError, match="no path"):
        ServerAddress.parse("unix:")
