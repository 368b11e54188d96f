"""Listening sockets: on all addresses of a host, with both versions of IP where the machine has them, or on a file."""

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Sequence
from typing import Any

from jaxserve.core.errors import ConfigError

ANY = ("", "*")  # names of all addresses of this machine
LOOPBACK = ("127.0.0.1", "::1")
BACKLOG = 2048  # connections that the system holds until they are accepted
NO_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)  # the machine lacks a version of IP
ATTEMPTS = 20  # to find a free port that all addresses have
ANSWER_SECONDS = 1.0  # in which a server that listens on a Unix socket must accept a connection

Address = tuple[socket.AddressFamily, tuple[Any, ...]]


def listen(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on every address of a host, all on the same port. Port 0: any free one.

    `::` and an empty host are all addresses of both versions of IP, and localhost is both loopback addresses. Raise
    ConfigError, naming the options, if no address can be bound, or one is in use.
    """
    for attempt in range(ATTEMPTS):
        try:
            return _listen_on_any(port) if host in ANY else _listen(_addresses(host, port), port)
        except OSError as error:
            if port == 0 and error.errno == errno.EADDRINUSE and attempt < ATTEMPTS - 1:
                continue
            raise ConfigError(f"cannot listen on {host}:{port}: {_reason(host, error)} (--host, --port)") from error
    raise AssertionError("unreachable")


def listen_on_file(path: str, mode: int) -> socket.socket:
    """Return a Unix socket that listens on a file with these permissions, in place of one that no server listens on.

    Raise ConfigError, naming the option, if the file is anything else, or cannot be made.
    """
    try:
        remove_socket_file(path)
        listener = socket.socket(socket.AF_UNIX)
        umask = os.umask(0o177)  # nobody else may connect before the permissions are set
        try:
            listener.bind(path)
        finally:
            os.umask(umask)
        os.chmod(path, mode)
        listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error} (--uds)") from error
    return listener


def remove_socket_file(path: str) -> None:
    """Remove the file of a Unix socket if no server listens on it. Raise OSError if it is something else."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise FileExistsError(errno.EEXIST, "a file that is no socket is there")
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(ANSWER_SECONDS)
        try:
            client.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except TimeoutError:
            pass
    raise OSError(errno.EADDRINUSE, "another server listens there")


def urls(listeners: Sequence[socket.socket], scheme: str = "http") -> list[str]:
    """Return the addresses at which a client on this machine reaches listening sockets; `unix:PATH` for a file."""
    found: list[str] = []
    for listener in listeners:
        if listener.family == socket.AF_UNIX:
            found.append(f"unix:{os.path.abspath(listener.getsockname())}")
            continue
        bound, port = listener.getsockname()[:2]
        any_six = LOOPBACK[1:] if bound == "::" and _is_six_alone(listener) else LOOPBACK
        hosts = {"0.0.0.0": LOOPBACK[:1], "::": any_six}.get(bound, (str(bound),))
        found += [f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}" for host in hosts]
    return found


def _addresses(host: str, port: int) -> list[Address]:
    """Return the addresses of a host. Raise OSError if it is unknown."""
    host = host.removeprefix("[").removesuffix("]")
    names = LOOPBACK if host.lower() == "localhost" else (host,)
    infos = [info for name in names for info in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys((family, address) for family, _, _, _, address in infos))


def _listen_on_any(port: int) -> list[socket.socket]:
    try:
        return _listen(_addresses("::", port), port)
    except OSError as error:
        if error.errno not in NO_FAMILY and not isinstance(error, socket.gaierror):
            raise
        return _listen(_addresses("0.0.0.0", port), port)


def _listen(addresses: Sequence[Address], port: int) -> list[socket.socket]:
    """Return a socket for each address whose version of IP the machine has. Raise OSError if none can be bound."""
    with contextlib.ExitStack() as opened:
        listeners: list[socket.socket] = []
        missing: OSError | None = None
        for family, address in addresses:
            try:
                listener = _socket(family, (address[0], port, *address[2:]))
            except OSError as error:
                if error.errno not in NO_FAMILY:
                    raise
                missing = error
                continue
            listeners.append(opened.enter_context(listener))
            port = listener.getsockname()[1]
        if missing is not None and not listeners:
            raise missing
        opened.pop_all()
        return listeners


def _socket(family: socket.AddressFamily, address: tuple[Any, ...]) -> socket.socket:
    both = address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)  # type: ignore[arg-type]


def _is_six_alone(listener: socket.socket) -> bool:
    return bool(listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY))


def _reason(host: str, error: OSError) -> str:
    # Of `socket.create_server`'s own text, the part before the address, which the caller names.
    reason = (error.strerror or str(error)).partition(" (while")[0]
    if error.errno in NO_FAMILY and ":" in host:
        return f"{reason} (this machine has no such IPv6 address: --host 0.0.0.0 are its IPv4 addresses)"
    return reason
