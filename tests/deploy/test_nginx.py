"""The nginx example in front of a server: streams pass at once, and what is for operators does not pass."""

import grp
import http.server
import os
import pwd
import shutil
import socket
import ssl
import subprocess
import threading
import time

import httpx
import pytest

from tests.deploy.serve_line import DEPLOY
from tests.server.fake import FakeClient
from tests.server.serving import serving

SITE = DEPLOY / "nginx" / "jaxserve.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
MAIN = """
daemon off;
user {user};
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/site.conf;
}}
"""

pytestmark = pytest.mark.skipif(NGINX is None or shutil.which("openssl") is None, reason="needs nginx and openssl")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def proxied(tmp_path):
    """Yield a function that starts nginx in front of a server's port, and returns a client of nginx."""
    key, certificate, port = tmp_path / "privkey.pem", tmp_path / "fullchain.pem", free_port()
    subject = ["-subj", "/CN=llm.example.com", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*command, *subject, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    started = []
    user = f"{pwd.getpwuid(os.getuid()).pw_name} {grp.getgrgid(os.getgid()).gr_name}"  # who may write into tmp_path

    def start(upstream: int, another: int | None = None) -> httpx.Client:
        site = SITE.read_text().replace("/etc/nginx/tls", str(tmp_path))
        site = site.replace("127.0.0.1:8000", f"127.0.0.1:{upstream}")
        if another is not None:
            site = site.replace("# server 127.0.0.1:8001", f"server 127.0.0.1:{another}")
            assert str(another) in site
        (tmp_path / "site.conf").write_text(site.replace("listen 443", f"listen 127.0.0.1:{port}"))
        (tmp_path / "nginx.conf").write_text(MAIN.format(folder=tmp_path, user=user))
        command = [NGINX, "-p", str(tmp_path), "-e", str(tmp_path / "error.log"), "-c", str(tmp_path / "nginx.conf")]
        subprocess.run([*command, "-t"], check=True, capture_output=True)
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        started.append(process)
        deadline = time.monotonic() + 30
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None, (tmp_path / "error.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return httpx.Client(base_url=f"https://localhost:{port}", verify=ssl.create_default_context(cafile=certificate))

    yield start
    for process in started:
        process.terminate()
        process.wait()


def test_streams_pass_at_once_and_operators_paths_do_not(proxied):
    with serving(FakeClient(script="ab", delay=30, delay_after=1)) as address, proxied(address.port) as client:
        assert client.get("/health").status_code == 200
        for path in ("/admin/status", "/dashboard/events", "/reset_prefix_cache", "/metrics", "/load", "/live"):
            assert client.get(path).status_code == 403, path
        for path in ("/", "/dashboard", "/dashboard/style.css", "/docs"):
            assert client.get(path, headers={"accept": "text/html"}).status_code == 200, path
        body = {"model": "fake", "prompt": "x", "max_tokens": 2, "stream": True}
        with client.stream("POST", "/v1/completions", json=body, timeout=20) as answer:
            assert answer.status_code == 200
            first = next(answer.iter_lines())  # the second token takes longer than the client waits
        assert '"a"' in first


class Busy(http.server.BaseHTTPRequestHandler):
    """Answers like a server that starts, shuts down or has a full queue, when it has read the request."""

    asked = 0

    def do_POST(self):
        Busy.asked += 1
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(503)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("size", [1, 2_000_000])
def test_what_one_server_cannot_take_is_answered_by_another(proxied, size):
    Busy.asked = 0
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Busy) as busy,
        serving(FakeClient()) as address,
        proxied(busy.server_port, address.port) as client,
    ):
        threading.Thread(target=busy.serve_forever, daemon=True).start()
        body = {"model": "fake", "prompt": "x", "max_tokens": 1, "user": "u" * size}
        assert [client.post("/v1/completions", json=body).status_code for _ in range(4)] == [200] * 4
        assert Busy.asked
        busy.shutdown()


def test_server_that_is_gone_is_passed_over(proxied):
    with serving(FakeClient()) as address, proxied(free_port(), address.port) as client:
        body = {"model": "fake", "prompt": "x", "max_tokens": 1}
        assert [client.post("/v1/completions", json=body).status_code for _ in range(4)] == [200] * 4


def test_large_bodies_pass_up_to_the_servers_limit(proxied):
    with serving(FakeClient()) as address, proxied(address.port) as client:
        body = {"model": "fake", "prompt": "x", "max_tokens": 1, "user": "u" * 2_000_000}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.post("/v1/completions", content=b"x" * 36_000_000).status_code == 413
