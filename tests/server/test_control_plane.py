"""Operators' routes and commands on a real control plane: accepted policies, and records in the step log."""

import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from jaxserve.cli.main import app
from jaxserve.control import DeviceLedgers, Ledger, PlanInForce
from jaxserve.control.controller import Controller
from jaxserve.control.policies import POLICY_NAMES, MorphPolicy, load_policy
from jaxserve.control.service import ControlPlane
from jaxserve.core.clock import SystemClock
from jaxserve.server.schemas.admin import Decision
from jaxserve.telemetry import Snapshot
from tests.server.fake import FakeClient
from tests.server.serving import serving
from tests.support.control import VirtualActuator, home_plan, machine

HOME, MACHINE = home_plan(), machine()
OWN_CLASS = (
    "from jaxserve.control.policies import StaticPolicy\n\ndef Own(resources, order):\n    return StaticPolicy('own')"
)


class Server:
    """A server with a control plane whose policy comes from a file. Transitions take no time."""

    def __init__(self, policy: str):
        load = partial(load_policy, resources=MACHINE, swap_order=range(16))
        actuator = VirtualActuator(PlanInForce(HOME))
        actuator.now = math.inf
        self.loaded: list[str] = []

        def loading(name, **options):
            self.loaded.append(name)
            return load(name, **options)

        self.controller = Controller(actuator.in_force, load(policy), MACHINE, {"0": actuator}, tick=0.01)
        self.control = ControlPlane(
            self.controller,
            MACHINE,
            DeviceLedgers({0: Ledger(MACHINE.budget)}),
            SystemClock(),
            snapshots=lambda: {"0": Snapshot(kv_pages_total=400)},
            policy_names=POLICY_NAMES,
            load_policy=loading,
            started_with=policy,
        )

    def put(self, url: str, policy: str) -> httpx.Response:
        return httpx.put(f"{url}/admin/policy", json={"policy": policy})


@pytest.fixture(params=["own.yaml", "own.py:Own"])
def source(request, tmp_path: Path) -> str:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"policy": "morph", "settings": {"queue_delay": 0.7}}))
    (tmp_path / "own.py").write_text(OWN_CLASS)
    return f"{tmp_path}/{request.param}"


@pytest.fixture
def server(source) -> Iterator[Server]:
    server = Server(source)
    yield server
    server.control.close()


@pytest.fixture
def url(server) -> Iterator[str]:
    with serving(FakeClient(control=server.control)) as address:
        yield address.url


def test_own_policy_resumes_unchanged_after_another_policy(server, url, source):
    first = server.controller.policy
    assert httpx.get(f"{url}/admin/status").json()["policies"] == [*POLICY_NAMES, source]
    for name in POLICY_NAMES:
        assert server.put(url, name).status_code == 202
        assert server.controller.policy.name == name
        Path(source.partition(":")[0]).write_text("nothing that could be read again")
        assert server.put(url, source).status_code == 202
        assert server.controller.policy is first
    assert server.loaded == list(POLICY_NAMES), "no policy was loaded from the file"
    assert not isinstance(first, MorphPolicy) or first.settings.queue_delay == 0.7


def test_step_log_records_who_changed_what(server, url, source):
    plan = httpx.get(f"{url}/admin/plan").json()
    assert httpx.put(f"{url}/admin/plan", json=plan).status_code == 202
    server.put(url, "static")
    server.put(url, source)
    server.put(url, "nothing")
    decisions = httpx.get(f"{url}/admin/decisions").json()["decisions"]
    assert [decision["reason"] for decision in decisions] == [
        f"by the operator: a plan, policy {source} -> manual",
        "by the operator: policy manual -> static",
        f"by the operator: policy static -> {source}",
    ]
    assert [decision["policy"] for decision in decisions] == ["manual", "static", server.controller.policy.name]
    for decision in decisions:
        Decision.model_validate(decision, strict=True)
        assert (decision["outcome"], decision["transitions"]) == ("done", [])
        assert decision["before_version"] == decision["target_version"] == 1
    assert [decision["time"] for decision in decisions] == sorted(decision["time"] for decision in decisions)
    shown = CliRunner().invoke(app, ["plan", "show"], env={"JAXSERVE_URL": url, "COLUMNS": "200", "NO_COLOR": "1"})
    assert shown.stdout.count("✓ done") == 3
    assert re.search(r"✓ done +1 → 1 +by the operator: policy manual -> static", shown.stdout)


@pytest.mark.parametrize(
    "name",
    [
        "{folder}/other.yaml",
        "{folder}/other.py:Own",
        "{folder}/../{last}/own.yaml",
        "{folder}/./own.py:Own",
        "own.yaml",
        "own.py:Own",
        " morph",
        "morph\n",
        "MORPH",
        "jaxserve.control.policies:StaticPolicy",
        "file:///etc/passwd",
        "\0",
        "",
        "x" * 5000,
    ],
)
def test_unknown_policy_name_is_refused_without_opening_a_file(server, url, source, name):
    folder = Path(source).parent
    trap = folder / "trap"
    (folder / "other.yaml").write_text("policy: static")
    (folder / "other.py").write_text(f"open({str(trap)!r}, 'w')\n{OWN_CLASS}")
    (folder / "own.py").write_text(f"open({str(trap)!r}, 'w')\n{OWN_CLASS}")
    before = server.controller.policy
    answer = server.put(url, name.format(folder=folder, last=folder.name))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "policy"
    assert (server.controller.policy, server.loaded) == (before, [])
    assert not trap.exists()


def test_plan_set_returns_to_the_servers_own_policy(server, url, source, tmp_path):
    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["plan", *arguments], env={"JAXSERVE_URL": url, "COLUMNS": "200"})
        assert done.exit_code == 0, done.stderr
        return done.stdout

    first, plan = server.controller.policy, tmp_path / "plan.yaml"
    plan.write_text(run("show", "--format", "yaml"))
    assert run("set", str(plan)).endswith("the policy manual decides\n")
    assert server.put(url, source).status_code == 202
    assert server.controller.policy is first
    refused = CliRunner().invoke(app, ["plan", "set", "--policy", "other.py:Own"], env={"JAXSERVE_URL": url})
    assert refused.exit_code == 1
    assert source in refused.stderr, "the error lists the policies"
