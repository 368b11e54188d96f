"""The end of a server as Kubernetes sees it, with the command and the probes of the manifest, and a fake engine."""

import signal
import time

import httpx

from tests.deploy.serve_line import DEPLOY, documents
from tests.server.fake_serve import FAKE_SERVE
from tests.server.process import server_process

(DEPLOYMENT,) = documents(DEPLOY / "kubernetes" / "cpu" / "deployment.yaml")
(SERVER,) = DEPLOYMENT["spec"]["template"]["spec"]["containers"]


def test_requests_are_served_until_no_more_are_sent():
    words = [word for word in SERVER["args"] if not word.startswith("--host")] + ["--port", "0"]
    ready, alive = (SERVER[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe"))
    with server_process("-c", FAKE_SERVE, *words) as server, httpx.Client(base_url=server.url) as client:
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
