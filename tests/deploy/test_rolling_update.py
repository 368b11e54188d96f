"""The end of a server as Kubernetes sees it, with the command and the probes of the manifest, and a fake engine."""

import signal
import time

import httpx

from tests.deploy.serve_line import DEPLOY, documents
from tests.server.process import server_process

SERVE = """
import sys
import jaxserve.build
from jaxserve.cli import main
from jaxserve.engine import model_tokenizer
from tests.server.fake import FakeClient
jaxserve.build.async_engine = jaxserve.build.build_async_engine = lambda *_, **__: FakeClient()
jaxserve.build.build = lambda *_, **__: None
import jaxserve.preparation
jaxserve.preparation.prepare_in_background = lambda *_: None
model_tokenizer.check_serves_text = lambda *_: None
sys.argv = ["jaxserve", "serve", *sys.argv[1:]]
main.main()
"""
(DEPLOYMENT,) = documents(DEPLOY / "kubernetes" / "cpu" / "deployment.yaml")
(SERVER,) = DEPLOYMENT["spec"]["template"]["spec"]["containers"]


def test_requests_are_served_until_no_more_are_sent():
    words = [word for word in SERVER["args"] if not word.startswith("--host")] + ["--port", "0"]
    ready, alive = (SERVER[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe"))
    with server_process("-c", SERVE, *words) as server, httpx.Client(base_url=server.url) as client:
        while client.get(ready).status_code != 200:
            time.sleep(0.02)
        assert client.get(alive).status_code == 200
        server.signal(signal.SIGTERM)
        while client.get(ready).status_code == 200:
            time.sleep(0.02)
        # Not ready, and still serving: balancers learn it a moment later.
        assert client.get(alive).status_code == 200
        body = {"model": "fake", "prompt": "x", "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == 200
        server.signal(signal.SIGTERM)  # a second one ends the process at once
        assert server.wait() != 0
