"""The run of a server: it binds first, loads the engine while it answers probes, and drains on the first signal.

After the first SIGTERM or SIGINT, the server serves for another `shutdown_delay` seconds, in which its probes send
balancers away. Then new requests are refused, and requests in flight have `shutdown_timeout` seconds to end. A second
signal, or a signal while the model is loading, ends the process at once.
"""

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

import anyio
import uvicorn
from fastapi import FastAPI

from jaxserve.core.errors import ConfigError
from jaxserve.engine.client import EngineClient
from jaxserve.server.activity import log_activity
from jaxserve.server.app import create_app
from jaxserve.server.http import open_files
from jaxserve.server.http.connections import MAX_HEAD_BYTES, Connections, HttpProtocol, HttpServer
from jaxserve.server.http.listening import listen, listen_on_file, remove_socket_file, urls
from jaxserve.server.http.tls import Certificates, certificates
from jaxserve.server.settings import ServerSettings
from jaxserve.server.state import ServerState

logger = logging.getLogger(__name__)

# Seconds for the last bytes to reach clients after every request has ended.
FLUSH_TIMEOUT = 2

Load = Callable[[], EngineClient]


def run_server(load: Load, settings: ServerSettings, on_ready: Callable[[Sequence[str], EngineClient], None]) -> None:
    """Serve until a signal. `load` builds the engine in a thread, and `on_ready(urls, client)` is then called once.

    Raise ConfigError if the address cannot be bound or a file of TLS cannot be used, and any exception that `load`
    raises.
    """
    tls = certificates(settings)
    open_files.raise_limit()
    # Imports modules that the first request would import, when perhaps no file can be opened any more.
    anyio.run(anyio.sleep, 0)
    listeners = _listeners(settings)
    app = create_app(None, settings)
    config = server_config(app, settings)
    server = DrainingServer(config, tls, app, load, settings)
    server.on_loaded = lambda client: on_ready(urls(listeners, "http" if tls is None else "https"), client)
    try:
        server.run(sockets=listeners)
    finally:
        _remove_socket_file(settings)
    if server.load_error is not None:
        raise server.load_error


def _listeners(settings: ServerSettings) -> list[socket.socket]:
    if settings.uds is None:
        return listen(settings.host, settings.port)
    return [listen_on_file(str(settings.uds), settings.socket_mode)]


def _remove_socket_file(settings: ServerSettings) -> None:
    """Remove the file of a Unix socket after it was closed, unless another server listens on it by now."""
    if settings.uds is not None:
        with contextlib.suppress(OSError):
            remove_socket_file(str(settings.uds))


def server_config(app: FastAPI, settings: ServerSettings) -> uvicorn.Config:
    """Return uvicorn's configuration for the app. The caller configures the loggers."""
    shared = Connections(settings.header_timeout, open_files.max_connections())
    return uvicorn.Config(
        app,
        http=partial(HttpProtocol, shared=shared),  # type: ignore[arg-type] # h11 bounds the size of headers
        h11_max_incomplete_event_size=MAX_HEAD_BYTES - 1,  # a whole head has one byte more
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=settings.access_log,
        server_header=False,
        timeout_keep_alive=settings.keep_alive_timeout,  # type: ignore[arg-type] # a number for call_later
        headers=[("keep-alive", f"timeout={math.floor(settings.keep_alive_timeout)}")],
        timeout_graceful_shutdown=FLUSH_TIMEOUT,
    )


class DrainingServer(HttpServer):
    """A server that loads its engine while it answers probes, and drains the engine before it closes."""

    def __init__(
        self, config: uvicorn.Config, tls: Certificates | None, app: FastAPI, load: Load, settings: ServerSettings
    ):
        super().__init__(config, tls)
        self.on_loaded: Callable[[EngineClient], None] = lambda client: None
        self.load_error: BaseException | None = None
        self._state: ServerState = app.state.server
        self._load = load
        self._settings = settings
        self._listeners: list[socket.socket] = []
        self._delay, self._timeout = settings.shutdown_delay, settings.shutdown_timeout  # seconds
        self._signals = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, and to load the engine in a thread."""
        self._loop = asyncio.get_running_loop()
        self._listeners = sockets or []
        await super().startup(sockets)
        threading.Thread(target=self._load_engine, name="jaxserve-load", daemon=True).start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, and end the process at the second. Runs in the main thread as a signal handler."""
        self._signals += 1
        if self._signals > 1 or self._state.loaded is None:
            for listener in self._listeners:
                os.close(listener.detach())  # the event loop would put off a mere `close`
            _remove_socket_file(self._settings)
            os._exit(128 + sig)
        self._loop.call_soon_threadsafe(self._start_draining, signal.Signals(sig).name)

    def _load_engine(self) -> None:
        try:
            client = self._load()
            self._check(client)
        except BaseException as error:
            self.load_error = error
            self.should_exit = True
            return
        gc.collect()
        # The loaded objects stay: without this, each full collection would take 0.1 s to visit them.
        gc.freeze()
        self._loop.call_soon_threadsafe(self._attach, client)

    def _check(self, client: EngineClient) -> None:
        """Close the engine and raise ConfigError if the settings do not fit the model."""
        try:
            self._state.check_defaults(client)
        except ConfigError:
            asyncio.run_coroutine_threadsafe(client.shutdown(), self._loop).result()
            raise

    def _attach(self, client: EngineClient) -> None:
        self._state.attach(client)
        open_files.warn_if_few(client.info.max_queued_requests)
        if self._settings.log_interval:
            self._keep(asyncio.ensure_future(log_activity(client, self._settings.log_interval, self._loop.time)))
        self.on_loaded(client)

    def _start_draining(self, signal_name: str) -> None:
        self._state.terminate()
        # Clients open their next connection elsewhere. uvicorn makes the headers of all responses anew every second.
        self.config.encoded_headers = [(b"connection", b"close")]
        self.server_state.default_headers = self.config.encoded_headers
        self._keep(asyncio.ensure_future(self._drain(signal_name)))

    def _keep(self, task: asyncio.Task[None]) -> None:
        """Keep a task from being collected: the event loop itself has only a weak reference."""
        self._tasks.add(task)

    async def _drain(self, signal_name: str) -> None:
        client = self._state.loaded
        assert client is not None  # a signal while loading ends the process
        try:
            if self._delay:
                logger.warning("%s: refusing new requests in %g s (--shutdown-delay)", signal_name, self._delay)
                await asyncio.sleep(self._delay)
            self._state.start_draining()
            logger.warning(
                "%s: refusing new requests, %d in flight have %g s to end; repeat the signal to stop at once",
                signal_name,
                client.snapshot().num_running + client.snapshot().num_waiting,
                self._timeout,
            )
            if not await client.drain(self._timeout):
                logger.warning("aborting the requests still in flight after %g s (--shutdown-timeout)", self._timeout)
            await client.shutdown()
        finally:
            self.should_exit = True
