"""Start-up: seconds from the start of a process until it is ready, and until its first token.

Every measurement is a fresh process. With the cache "empty" everything is compiled; a "warm" start uses the cache that
the empty one has filled. The library reports its phases (`phases`). The server is ready when it says so, and its first
token is that of a streamed completion requested at once.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2

from jaxserve.bench.offline.options import Row, StartupOptions, changed_fields
from jaxserve.bench.spawn import spawned
from jaxserve.core.clock import SystemClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError

PHASES = "jaxserve.bench.offline.phases"
Measured = dict[str, float | None]


def startup(options: StartupOptions, on_process: Callable[[], None] | None = None) -> Iterator[Row]:
    """Yield a row for each front (library, server) and state of the cache, with medians over the repeats.

    Raise ConfigError with the end of the process's output, or SpawnError, if a process fails.
    """
    fronts: dict[str, Callable[[EngineConfig, float], Measured]] = {"library": library}
    if options.server:
        fronts["server"] = server
    for front, measure in fronts.items():
        found: dict[str, list[Measured]] = {"empty": [], "warm": []}
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory(prefix="jaxserve-") as cache:
                config = replace(options.engine, compile_cache=str(Path(cache) / "xla"))
                for measured in found.values():
                    measured.append(measure(config, options.timeout_s))
                    if on_process is not None:
                        on_process()
        for state, measured in found.items():
            yield {"front": front, "cache": state, "repeats": options.repeats, **medians(measured)}


def medians(measured: list[Measured]) -> Row:
    """Return the median of every figure, or None where a value is missing."""
    return {
        name: round(statistics.median(values), 2)
        if None not in (values := [found[name] for found in measured])
        else None
        for name in measured[0]
    }


def library(config: EngineConfig, timeout_s: float) -> Measured:
    """Return the phases of a process that builds an engine and generates one token. Raise ConfigError if it fails."""
    started = SystemClock().now()
    command = [sys.executable, "-m", PHASES, json.dumps(changed_fields(config))]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"the engine was not ready after {timeout_s:g} s") from error
    if done.returncode:
        raise ConfigError(f"the engine did not start:\n{done.stderr.strip()[-2000:]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    marks = {"started": started, **report["marks"]}
    ends_and_starts = zip(report["marks"].items(), marks.values(), strict=False)
    took = {f"{name}_s": end - start for (name, end), start in ends_and_starts}
    # The engine resolves its configuration once more while it is built, which `load` should not include.
    again = min(took["resolve_s"], took["load_s"])
    took["load_s"] -= again
    ready = marks["compile"] - started - again
    first = ready + took.pop("first_token_s")
    return {**took, "ready_s": ready, "first_token_s": first, **report["figures"]}


def server(config: EngineConfig, timeout_s: float) -> Measured:
    """Return the seconds until a server is ready and until its first streamed token. Raise SpawnError."""
    clock = SystemClock()
    with tempfile.TemporaryDirectory(prefix="jaxserve-") as folder:
        file = Path(folder) / "serve.yaml"
        file.write_text(json.dumps(changed_fields(config)))  # JSON is YAML
        started = clock.now()
        with spawned(["--config", str(file)], timeout_s=timeout_s) as url:
            ready = clock.now() - started
            first_token(url, timeout_s)
            return {"ready_s": ready, "first_token_s": clock.now() - started}


def first_token(url: str, timeout_s: float) -> None:
    """Wait for the first event of a streamed completion. Raise ConfigError if there is none."""
    with httpx2.Client(base_url=url, timeout=timeout_s, trust_env=False) as client:
        name = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": name, "prompt": [3, 4, 5], "max_tokens": 1, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            line = next(response.iter_lines(), "")
            if response.status_code != 200 or not line.startswith("data: {"):
                raise ConfigError(f"the server sent no first token: {response.status_code} {line!r}")
