"""A real HTTP server on a free local port, in a thread of the test process."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from jaxserve.engine.client import EngineClient
from jaxserve.server.app import create_app
from jaxserve.server.http.connections import HttpServer
from jaxserve.server.http.listening import listen, listen_on_file
from jaxserve.server.http.tls import certificates
from jaxserve.server.runner import server_config
from jaxserve.server.settings import ServerSettings


@dataclass(frozen=True)
class Address:
    """The host and port at which a server listens."""

    host: str
    port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"


@contextlib.contextmanager
def serving(client: EngineClient | None, settings: ServerSettings | None = None, *, port: int = 0) -> Iterator[Address]:
    """Serve until the block ends."""
    settings = settings or ServerSettings()
    app = create_app(client, settings)
    if settings.uds is None:
        (listener,) = listen("127.0.0.1", port)
    else:
        listener = listen_on_file(str(settings.uds), settings.socket_mode)
    server = HttpServer(server_config(app, settings), certificates(settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        bound = 0 if settings.uds else listener.getsockname()[1]
        yield Address("127.0.0.1", bound, "https" if settings.ssl_certfile else "http")
    finally:
        app.state.server.start_draining()  # ends endless streams
        server.should_exit = True
        thread.join()
        listener.close()


def raw_request(address: Address, head: bytes, body: bytes = b"") -> bytes:
    """Send a raw request and return the raw answer until the server closes the connection."""
    with socket.create_connection((address.host, address.port), timeout=30) as connection:
        connection.sendall(head + b"\r\n\r\n" + body)
        received = b""
        while part := connection.recv(65536):
            received += part
        return received
