"""Start-up: seconds from the start of the server's process until it is ready, and until a first token arrives.

Each model is served twice in processes of their own: with an empty compilation cache, and with the one that the first
left behind. Ready is the first 200 of /ready; the first token is the first text of a streamed completion that is sent
as soon as the server is ready.
"""

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.peers.__main__ import DEFAULT_CACHE
from bench.peers.checkpoints import SHAPES, ensure_checkpoint
from jaxserve.bench.environment import describe

POLL = 0.02  # seconds
PATIENCE = 300.0  # seconds


def main() -> None:
    """Measures the bundled model and the random checkpoints that were asked for; prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=("bundled", *SHAPES), default=["bundled", "160m"])
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE, help="where the checkpoints are kept")
    args = parser.parse_args()
    print("| model | compilation cache | ready, s | first token, s |\n| --- | --- | ---: | ---: |")
    for model in args.models:
        arguments = [] if model == "bundled" else [str(ensure_checkpoint(model, args.cache_dir))]
        with tempfile.TemporaryDirectory() as cache:
            for state in ("empty", "warm"):
                ready, first = measure(arguments, Path(cache))
                print(f"| {model} | {state} | {ready:.1f} | {first:.1f} |", flush=True)
    for key, value in describe().items():
        print(f"- {key}: {value}")


def measure(arguments: list[str], cache: Path) -> tuple[float, float]:
    """Seconds to ready and to the first token of a server with `cache` as the user's cache directory."""
    port = free_port()
    start = "from jaxserve.cli import main; main()"
    command = [sys.executable, "-c", start, "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    begun = time.perf_counter()
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        wait_until_ready(server, port)
        ready = time.perf_counter() - begun
        first_token(port)
        return ready, time.perf_counter() - begun
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(PATIENCE)


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    """Returns at the first 200 of /ready. Raises RuntimeError if the server ends, TimeoutError if it takes too long."""
    deadline = time.perf_counter() + PATIENCE
    while time.perf_counter() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with code {server.returncode} before it was ready")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass  # not listening yet
        finally:
            connection.close()
        time.sleep(POLL)
    raise TimeoutError(f"not ready after {PATIENCE:.0f} s")


def first_token(port: int) -> None:
    """Returns when the first event of a streamed completion has arrived. Raises RuntimeError if there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    body = json.dumps({"model": served_name(port), "prompt": [7, 8, 9], "max_tokens": 1, "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    line = response.readline()
    connection.close()
    if response.status != 200 or not line.startswith(b"data: {"):
        raise RuntimeError(f"no first token: {response.status} {line!r}")


def served_name(port: int) -> str:
    """The name under which the model is served."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("GET", "/v1/models")
    name = json.loads(connection.getresponse().read())["data"][0]["id"]
    connection.close()
    return name


if __name__ == "__main__":
    main()
