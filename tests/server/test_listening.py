"""Addresses that a server listens on: both versions of IP, on one port, and errors that name the options."""

import errno
import socket

import pytest

from jaxserve.core.errors import ConfigError
from jaxserve.server.http import listening
from jaxserve.server.http.listening import listen, urls


def has_six() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_six = pytest.mark.skipif(not has_six(), reason="this machine has no IPv6")


def reached(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=10).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("localhost", ("127.0.0.1", "::1")),
        ("LOCALHOST", ("127.0.0.1", "::1")),
        ("127.0.0.1", ("127.0.0.1",)),
        pytest.param("::1", ("::1",), marks=needs_six),
        pytest.param("[::1]", ("::1",), marks=needs_six),
    ],
)
def test_loopback_addresses(host, found):
    listeners = listen(host, 0)
    try:
        (port,) = {listener.getsockname()[1] for listener in listeners}
        for address in ("127.0.0.1", "::1"):
            there = address in found and (address == "127.0.0.1" or has_six())
            assert reached(address, port) == there
        shown = [f"http://[{each}]:{port}" if ":" in each else f"http://{each}:{port}" for each in found]
        assert urls(listeners) == [url for url in shown if has_six() or "[" not in url]
    finally:
        for listener in listeners:
            listener.close()


@needs_six
@pytest.mark.parametrize("host", ["::", "", "*"])
def test_all_addresses_are_one_socket_for_both_versions(monkeypatch, host):
    asked = []
    real = socket.create_server
    # Tests bind loopback addresses alone: what matters is what the system would be asked for.
    monkeypatch.setattr(
        listening.socket,
        "create_server",
        lambda address, **options: asked.append((address[0], options)) or real(("127.0.0.1", 0)),
    )
    (listener,) = listen(host, 0)
    listener.close()
    ((address, options),) = asked
    assert address == "::"
    assert options["family"] == socket.AF_INET6
    assert options["dualstack_ipv6"] is True


def without(monkeypatch, family: socket.AddressFamily) -> None:
    """Let the machine lack a version of IP."""
    real = socket.create_server

    def create(address, **options):
        if options["family"] == family:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return real(("127.0.0.1" if address[0] == "0.0.0.0" else address[0], *address[1:]), **options)

    monkeypatch.setattr(listening.socket, "create_server", create)


@pytest.mark.parametrize("host", ["localhost", "", "*"])
def test_machine_without_ipv6_listens_on_ipv4(monkeypatch, host):
    without(monkeypatch, socket.AF_INET6)
    (listener,) = listen(host, 0)
    assert listener.getsockname()[0] == "127.0.0.1"
    listener.close()


def test_missing_ipv6_is_named(monkeypatch):
    without(monkeypatch, socket.AF_INET6)
    with pytest.raises(ConfigError, match=r"no such IPv6 address: --host 0\.0\.0\.0 .*\(--host, --port\)"):
        listen("::", 0)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_port_in_use_is_named_and_leaves_no_socket(host):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on {host}:{port}: Address already in use \(--host"):
            listen(host, port)
    for listener in listen(host, port):
        listener.close()


@needs_six
def test_second_address_with_a_taken_port_finds_another(monkeypatch):
    real, taken = socket.create_server, []

    def create(address, **options):
        if options["family"] == socket.AF_INET6 and not taken:
            taken.append(address[1])
            raise OSError(errno.EADDRINUSE, "Address already in use")
        return real(address, **options)

    monkeypatch.setattr(listening.socket, "create_server", create)
    listeners = listen("localhost", 0)
    assert len({listener.getsockname()[1] for listener in listeners}) == 1
    assert len(listeners) == 2
    for listener in listeners:
        listener.close()


def test_unknown_host_is_named():
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.host\.invalid:0: .*\(--host, --port\)"):
        listen("no.such.host.invalid", 0)
