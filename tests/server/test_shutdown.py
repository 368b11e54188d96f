"""Shutdown: SIGTERM drains, a second signal ends at once, and a failed start leaves no process."""

import contextlib
import signal
import socket
import time

import httpx
import pytest

from tests.server.process import server_process, started

SERVE = """
import threading
from jaxserve.server.runner import run_server
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
load = {load}
run_server(load, ServerSettings(port=0, {settings}), lambda urls, client: print(*urls, flush=True))
"""
SLOW = "lambda: FakeClient(script='x' * 200, delay=0.005)"
NEVER_ENDING = "lambda: FakeClient(script='x' * 400, delay=3600, delay_after=3)"
BODY = {"prompt": "a", "max_tokens": 400, "stream": True}


def serve(load: str, settings: str = ""):
    return server_process("-c", SERVE.format(load=load, settings=settings))


@contextlib.contextmanager
def stream(url: str):
    """Return the lines of a stream whose first event has arrived."""
    with httpx.Client(timeout=60) as http, http.stream("POST", f"{url}/v1/completions", json=BODY) as answer:
        assert answer.status_code == 200
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        yield lines


def wait_until(url: str, status: str) -> None:
    deadline = time.monotonic() + 30
    while httpx.get(f"{url}/health").json()["status"] != status:
        assert time.monotonic() < deadline


def wait_until_draining(url: str) -> None:
    wait_until(url, "draining")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_lets_streams_end_and_refuses_new_requests(number):
    with serve(SLOW) as server:
        with stream(server.url) as lines:
            server.signal(number)
            wait_until_draining(server.url)
            refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503
            assert "shutting down" in refused.json()["error"]["message"]
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert len(rest) == 201  # 199 tokens after the first, and the end
        assert '"finish_reason":"stop"' in rest[-2]
        assert server.wait() == 0


def test_stream_longer_than_the_shutdown_timeout_ends_with_an_error():
    with serve(NEVER_ENDING, "shutdown_timeout=0.1") as server:
        with stream(server.url) as lines:
            server.signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert "the engine has stopped" in rest[-2]
        assert server.wait() == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_the_server_at_once(second):
    with serve(NEVER_ENDING, "shutdown_timeout=3600") as server, stream(server.url):
        server.signal(signal.SIGTERM)
        wait_until_draining(server.url)
        server.signal(second)
        assert server.wait() == 128 + second


def test_server_serves_new_requests_until_the_end_of_the_shutdown_delay():
    with serve(SLOW, "shutdown_delay=3600") as server, httpx.Client(base_url=server.url) as http:
        assert http.get("/live").headers["keep-alive"]
        server.signal(signal.SIGTERM)
        wait_until(server.url, "terminating")
        answers = [http.get("/live"), http.post("/v1/completions", json={"prompt": "a"})]
        assert [(a.status_code, a.headers["connection"]) for a in answers] == [(200, "close")] * 2
        server.signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM


def test_requests_that_begin_in_the_shutdown_delay_have_the_whole_timeout():
    with serve(SLOW, "shutdown_delay=1") as server:
        server.signal(signal.SIGTERM)
        wait_until(server.url, "terminating")
        with stream(server.url) as lines:
            wait_until_draining(server.url)
            assert list(lines)[-1] == "data: [DONE]"
        assert server.wait() == 0


def test_idle_server_ends_on_the_first_signal():
    with serve(SLOW) as server:
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_probes_while_loading_answer_and_a_signal_ends_the_server():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = SERVE.format(load="threading.Event().wait", settings="").replace("port=0", f"port={port}")
    with started("-c", code) as process:
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.get(f"http://127.0.0.1:{port}/ready")
                break
            time.sleep(0.05)
        assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


def test_failed_load_prints_one_line_and_exits_with_1(tmp_path):
    with started("-m", "jaxserve.cli.main", "serve", str(tmp_path / "no-model"), "--port", "0") as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "no-model" in err
    assert "Traceback" not in err
    assert out == ""


def test_port_in_use_prints_one_line_and_exits_with_1():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with started("-m", "jaxserve.cli.main", "serve", "--port", port) as process:
            _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "--port" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("load", "timeout", "end"), [(SLOW, 60, "response.completed"), (NEVER_ENDING, 0.1, "response.failed")]
)
@pytest.mark.parametrize("background", [False, True])
def test_stream_of_a_response_tells_how_it_ended_before_the_server_exits(load, timeout, end, background):
    body = {"input": "hi", "stream": True, "background": background}
    with serve(load, f"shutdown_timeout={timeout}") as server:
        with httpx.Client(timeout=60) as http, http.stream("POST", f"{server.url}/v1/responses", json=body) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if line == "event: response.output_text.delta")
            server.signal(signal.SIGTERM)
            names = [line for line in lines if line.startswith("event: ")]
        assert names[-1] == f"event: {end}"
        assert server.wait() == 0
