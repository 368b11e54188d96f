"""Killing or terminating a server in the middle of each phase of a transition, with requests in flight."""

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from safetensors.numpy import save_file

from jaxserve import LLM, SamplingParams
from jaxserve.calibration.pipeline import QuantizationSettings
from jaxserve.calibration.run import run
from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.mapping import tensor_shapes
from jaxserve.cli.plan_client import PlanClient
from jaxserve.control.plan import Plan
from jaxserve.control.plan_yaml import from_yaml, to_yaml
from jaxserve.engine.step_log import read_log
from tests.server.process import PATIENCE, ServerProcess, server_process
from tests.support.thorough import some

PHASES = {  # phase: (change, method called in the middle of the phase)
    "copying": ("swap back", "jaxserve.actuator.throttle:Throttle.copied"),
    "exchanging blocks": ("swap", "jaxserve.actuator.actuator:DeviceInstance.replace_layers"),
    "freeing what was replaced": ("swap", "jaxserve.actuator.actuator:DeviceInstance.free_layers"),
    "growing": ("grow", "jaxserve.executor.pools:Pools.extend"),
    "shrinking": ("shrink", "jaxserve.executor.pools:Pools.shrink"),
}
RUNNING, WAITING = 4, 2  # requests
TOKENS = 300
PROMPT = "def f(x):"


@pytest.fixture(scope="module")
def model(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the random model's weights in a file, and prepared variants next to it."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    shutil.copytree(random_model, folder)
    dummy = open_checkpoint(folder, "dummy")
    shapes = {n: shape for block in dummy.config.block_ids for n, shape in tensor_shapes(dummy.config, block).items()}
    save_file({name: dummy.store.get(name, shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    run(folder, QuantizationSettings(("int4",), "rtn", 32))
    return folder


@pytest.fixture(scope="module")
def answer(model: Path) -> str:
    """Return the greedy answer in full precision."""
    with LLM(model, warmup=False, max_num_seqs=RUNNING) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text


@pytest.fixture(scope="module")
def arguments(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return a command whose files all servers of this module use one after the other."""
    folder = tmp_path_factory.mktemp("used")
    options = {
        "port": 0,
        "max-num-seqs": RUNNING,
        "max-num-batched-tokens": 36,
        "max-model-len": 512,
        "kv-pages": 200,
        "max-kv-pages": 220,
        "policy": "manual",
        "variant": "int4",
        "compile-cache": folder / "cache",
        "step-log": folder / "steps.jsonl",
    }
    return [
        "serve",
        str(model),
        "--no-warmup",
        *(text for name, value in options.items() for text in (f"--{name}", str(value))),
    ]


def target_of(change: str, plan: Plan) -> Plan:
    return {
        "swap": plan.with_precisions("0", {"layers.1": "int4"}),
        "swap back": plan.with_precisions("0", {"layers.1": "float32"}),
        "grow": plan.with_kv_pages("0", 215),
        "shrink": plan.with_kv_pages("0", 150),
    }[change]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ask(url: str, stream: bool) -> str:
    """Request a long answer and return its finish reason, "an error", or "cut off"."""
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
    try:
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
    except httpx.TransportError:
        return "cut off"
    last = response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        *_, last, done, _ = response.text.split("\n\n")
        assert done == "data: [DONE]"
    end = json.loads(last.removeprefix("data: "))
    return "an error" if "error" in end else end["choices"][0]["finish_reason"]


@contextmanager
def stopped(
    arguments: list[str], folder: Path, phase: str, answer: str, *more: str
) -> Iterator[tuple[ServerProcess, Callable[[], list[str]]]]:
    """Run a server that stops in a phase. Yield it, and a function that returns how its requests end."""
    change, method = PHASES[phase]
    command = ("-m", "tests.server.stalled_server", method, str(folder), *arguments, *more)
    with server_process(*command) as server, PlanClient(server.url, None) as control:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 4, "ignore_eos": True}
        said = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE).json()
        assert said["choices"][0]["text"] == answer

        def go_to(change: str) -> None:
            control.set_plan(to_yaml(target_of(change, from_yaml(control.plan("yaml")))))

        def load() -> tuple[int, int]:
            snapshot = control.status()["snapshot"]
            return snapshot["num_running"], snapshot["num_waiting"]

        if change == "swap back":
            go_to("swap")
            wait_for(lambda: "int4" in control.plan("yaml") and not control.status()["busy"])
        with ThreadPoolExecutor(RUNNING + WAITING) as threads:
            asked = [threads.submit(ask, server.url, bool(i % 2)) for i in range(RUNNING + WAITING)]
            wait_for(lambda: load() == (RUNNING, WAITING))
            go_to(change)
            wait_for((folder / "reached").exists)
            assert load() == (RUNNING, WAITING)
            yield server, lambda: [future.result(PATIENCE) for future in asked]


def wait_until_draining(url: str) -> None:
    wait_for(lambda: httpx.get(f"{url}/ready").json()["status"] == "draining")


def check_log(arguments: list[str]) -> list[str | None]:
    """Check that the step log can be read, and return how its requests ended."""
    recording = read_log(arguments[-1])
    assert recording.steps
    return [answer.reason for answer in recording.answers.values()]


@pytest.mark.parametrize("phase", some(PHASES, 2))
def test_restart_after_kill_in_a_phase_works_and_sigterm_lets_requests_end(
    arguments: list[str], answer: str, tmp_path: Path, phase: str
) -> None:
    """Kill one server, then terminate another that uses the files of the first."""
    killed, ended = tmp_path / "killed", tmp_path / "ended"
    killed.mkdir()
    ended.mkdir()
    with stopped(arguments, killed, phase, answer) as (server, outcomes):
        server.signal(signal.SIGKILL)
        assert outcomes() == ["cut off"] * (RUNNING + WAITING)
        assert server.wait() == -signal.SIGKILL
    assert check_log(arguments) == ["length"]
    with stopped(arguments, ended, phase, answer) as (server, outcomes):
        server.signal(signal.SIGTERM)
        wait_until_draining(server.url)
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": PROMPT}).status_code == 503
        (ended / "go").touch()
        assert outcomes() == ["length"] * (RUNNING + WAITING)
        assert server.wait() == 0
        assert "Traceback" not in server.errors.read_text()
    assert check_log(arguments) == ["length"] * (1 + RUNNING + WAITING)


def test_copy_longer_than_the_shutdown_timeout_is_abandoned(arguments: list[str], answer: str, tmp_path: Path) -> None:
    with stopped(arguments, tmp_path, "copying", answer, "--shutdown-timeout", "0") as (server, outcomes):
        server.signal(signal.SIGTERM)
        wait_until_draining(server.url)
        (tmp_path / "go").touch()
        assert outcomes() == ["an error"] * (RUNNING + WAITING)
        assert server.wait() == 0
        assert "Traceback" not in server.errors.read_text()
