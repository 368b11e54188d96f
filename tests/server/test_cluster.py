"""Instances that merge and split under a real server: by the policy tp_transform for long prompts, and by hand."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from typer.testing import CliRunner

from jaxserve import LLM, SamplingParams
from jaxserve.cli.main import app
from tests.server.conftest import write_model
from tests.server.process import server_process

PAGES, PAGE = 8, 16  # KV pages of one device, and tokens of a page
ONE = PAGES * PAGE  # tokens that one device holds
LONG = [3 + 7 * place % 250 for place in range(2 * ONE + 60)]  # needs four devices
SHORT = [11, 12, 13, 14]
OPTIONS = {
    "load-format": "dummy",
    "virtual-devices": 8,
    "dp": 4,
    "max-tp": 4,
    "kv-pages": PAGES,
    "max-kv-pages": PAGES,
    "page-size": PAGE,
    "max-num-seqs": 2,
    "max-num-batched-tokens": 66,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of a tiny model with 4 kv heads, so that 4 devices can share them."""
    return write_model(tmp_path_factory.mktemp("heads"), num_key_value_heads=4)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """Run a server whose policy splits instances soon. It compiles programs when they are first used."""
    folder = tmp_path_factory.mktemp("policy")
    (folder / "soon.yaml").write_text("policy: tp_transform\nsettings: {hold: 0.3}\n")
    given = [text for name, value in OPTIONS.items() for text in (f"--{name}", str(value))]
    given += ["--port", "0", "--no-warmup", "--no-fuse"]
    given += ["--compile-cache", str(folder), "--policy", f"{folder}/soon.yaml"]
    with server_process("-m", "jaxserve.cli.main", "serve", str(model), *given) as server:
        wait_for(lambda: httpx.get(f"{server.url}/ready").is_success)
        yield server.url


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def ask(url: str, prompt: list[int], tokens: int = 8) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json={"model": name_of(url), **body}, timeout=120)


def name_of(url: str) -> str:
    return httpx.get(f"{url}/v1/models").json()["data"][0]["id"]


def status(url: str) -> dict:
    return httpx.get(f"{url}/admin/status").json()


def transitions(url: str) -> list[str]:
    decisions = httpx.get(f"{url}/admin/decisions").json()["decisions"]
    return [text for decision in decisions if decision["outcome"] == "done" for text in decision["transitions"]]


def devices(url: str) -> list[list[int]]:
    return sorted(state["devices"] for state in status(url)["instance_states"])


def is_as_at_the_start(url: str) -> bool:
    return devices(url) == [[0], [1], [2], [3]] and not status(url)["busy"]


def test_long_prompt_is_answered_by_merged_instances_while_short_ones_stream(server, model):
    assert httpx.get(f"{server}/v1/models").json()["data"][0]["max_model_len"] >= 4 * ONE
    with ThreadPoolExecutor(4) as threads:
        short = [threads.submit(ask, server, [*SHORT, number], 100) for number in range(3)]
        answer = ask(server, LONG)
        answers = [each.result() for each in short]
    assert [each.status_code for each in (answer, *answers)] == [200] * 4
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(model, load_format="dummy", kv_pages=64, max_num_seqs=2) as llm:
        (expected,) = llm.generate([{"prompt_token_ids": LONG}], sampling)
    assert answer.json()["choices"][0]["text"] == expected.outputs[0].text
    wait_for(lambda: is_as_at_the_start(server))
    done = transitions(server)
    assert any(text.endswith("(devices 0, 2, 1, 3)") for text in done), "all instances merged"
    assert len({state["name"] for state in status(server)["instance_states"]} & {"0", "1", "2", "3"}) == 0
    load = httpx.get(f"{server}/load").json()
    assert load["waiting_room"]["requests"] == 0
    assert len(load["instances"]) == 4


def test_prompt_beyond_what_instances_hold_is_refused_with_both_limits(server):
    answer = ask(server, LONG * 4)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "maximum context length" in message
    assert f"can hold {ONE} tokens now" in message


def test_operators_merge_split_drain_remove_and_add_instances(server):
    def plan(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["plan", *arguments], env={"JAXSERVE_URL": server, "COLUMNS": "160"})
        assert done.exit_code == 0, done.stderr
        return done.stdout

    wait_for(lambda: is_as_at_the_start(server))
    states = sorted(status(server)["instance_states"], key=lambda state: state["devices"])
    first, second, *_ = [state["name"] for state in states]
    assert "the policy manual decides" in plan("merge", second, first)
    assert devices(server) == [[0, 1], [2], [3]]
    merged = next(state["name"] for state in status(server)["instance_states"] if state["tp"] == 2)
    assert "done after" in plan("split", merged)
    assert devices(server) == [[0], [1], [2], [3]]
    last = status(server)["instance_states"][-1]
    assert f"instance {last['name']} on 3, draining" in plan("drain", last["name"])
    assert ask(server, SHORT).status_code == 200
    assert "draining" not in plan("drain", last["name"], "--undo")
    plan("remove", last["name"])
    assert devices(server) == [[0], [1], [2]]
    plan("add", "--devices", "5")
    assert devices(server) == [[0], [1], [2], [5]]
    assert {each["device"] for each in status(server)["devices"]} >= {0, 1, 2, 3, 5}
    assert [ask(server, [*SHORT, number]).status_code for number in range(8)] == [200] * 8


def test_without_the_policy_a_long_prompt_is_refused_with_both_limits(server):
    httpx.put(f"{server}/admin/policy", json={"policy": "static"}).raise_for_status()
    wait_for(lambda: is_as_at_the_start(server))
    answer = ask(server, LONG)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert f"maximum context length is {ONE} tokens" in error["message"]
    assert "the policy tp_transform merges some to hold" in error["message"]
    assert error["value"] == len(LONG)
