"""Changes of policies and their settings while a server runs, also of policies that never answer."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from jaxserve.cli.main import app
from jaxserve.control import DeviceLedgers, InstancePlan, Ledger, Plan, Policy, Proposal, Resources
from jaxserve.control.controller import Controller
from jaxserve.control.plan import PlanInForce
from jaxserve.control.plan_yaml import to_yaml
from jaxserve.control.policies import ACCURACY, POLICY_NAMES, MorphPolicy, QualityLoss, StaticPolicy, load_policy
from jaxserve.control.service import MAX_SHOWN_INSTANCES, ControlPlane
from jaxserve.core.clock import SystemClock
from jaxserve.server.schemas.admin import PolicyInForce, Status
from jaxserve.telemetry import Snapshot
from tests.server.fake import FakeClient
from tests.server.serving import serving
from tests.support.control import VirtualActuator, home_plan, machine

MACHINE = machine()
LOSS = QualityLoss({"int8": [0.001] * 16, "int4": [0.01] * 16})


class Engine:
    """A control plane without an engine. Transitions take no time, and nothing is ever requested."""

    def __init__(
        self, policy: Policy | str, plan: Plan | None = None, resources: Resources = MACHINE, started_with: str = "own"
    ):
        load = partial(load_policy, resources=resources, swap_order=range(16), slo_ttft=3.0, loss=LOSS)
        plan = home_plan() if plan is None else plan
        in_force = PlanInForce(plan)
        actuators = {i.name: VirtualActuator(in_force, name=i.name) for i in plan.instances}
        for actuator in actuators.values():
            actuator.now = math.inf
        started_with, policy = (policy, load(policy)) if isinstance(policy, str) else (started_with, policy)
        self.controller = Controller(in_force, policy, resources, actuators, tick=0.01)
        self.control = ControlPlane(
            self.controller,
            resources,
            DeviceLedgers({0: Ledger(resources.budget)}),
            SystemClock(),
            snapshots=lambda: dict.fromkeys(actuators, Snapshot(time=time.monotonic(), kv_pages_total=400)),
            policy_names=POLICY_NAMES,
            load_policy=load,
            started_with=started_with,
        )


@pytest.fixture
def started() -> Iterator[Callable[..., Engine]]:
    """A function that starts an `Engine`, which is closed after the test."""
    engines: list[Engine] = []

    def start(*arguments: object, **options: object) -> Engine:
        engines.append(Engine(*arguments, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.control.close()


@pytest.fixture
def admin(started: Callable[..., Engine]) -> Iterator[tuple[Engine, httpx.Client]]:
    """A server that was started with the policy morph, and a client of its routes for operators."""
    engine = started("morph")
    with serving(FakeClient(control=engine.control)) as address, httpx.Client(base_url=f"{address.url}/admin") as http:
        yield engine, http


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- settings


def test_settings_are_changed_over_http(admin) -> None:
    engine, http = admin
    answer = http.put("/policy", json={"policy": "morph", "settings": {"queue_delay": 0.5, "slo_tpot": 0.05}})
    assert answer.status_code == 202, answer.text
    assert engine.controller.policy.settings.queue_delay == 0.5
    assert engine.controller.policy.slo_ttft == 3.0, "the option of the start stays"
    shown = http.get("/policy").json()
    PolicyInForce.model_validate(shown, strict=True)
    assert shown["policy"] == "morph"
    assert shown["settings"].keys() == vars(ACCURACY).keys()
    assert shown["settings"]["queue_delay"] == 0.5
    assert shown["settings"]["max_quality_loss"] == 0.05
    assert shown["objectives"] == {"slo_ttft": 3.0, "slo_tpot": 0.05, "max_quality_loss": 0.05}
    status = http.get("/status").json()
    Status.model_validate(status, strict=True)
    assert shown["objectives"].items() <= status.items()
    (decision,) = http.get("/decisions").json()["decisions"]
    assert decision["reason"] == "by the operator: policy morph -> morph with queue_delay 0.5, slo_tpot 0.05"
    answer = http.put("/policy", json={"policy": "morph", "settings": {"max_quality_loss": None}})
    assert answer.status_code == 202, answer.text
    assert http.get("/policy").json()["settings"]["max_quality_loss"] is None, "JSON has no infinity"


def test_shown_settings_can_be_set_again(admin) -> None:
    engine, http = admin
    before = engine.controller.policy.settings
    shown = http.get("/policy").json()
    assert http.put("/policy", json={key: shown[key] for key in ("policy", "settings")}).status_code == 202
    assert engine.controller.policy.settings == before


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        ("morph", {"kv_usage": 2}, "kv_usage is 2: it must be a share above 0, at most 1"),
        ("morph", {"kv_useage": 0.5}, "unknown setting 'kv_useage': choose from precision, slo_ttft"),
        ("morph", {"entry_layers": "two"}, "settings.entry_layers is 'two': it must be of type int"),
        ("morph", {"last_resort": "int3"}, "the engine was started without int3: start it with --variant int3"),
        ("static", {"kv_usage": 0.5}, "policy static: static has no settings"),
        ("own.py:Own", {"kv_usage": 0.5}, "unknown policy 'own.py:Own'"),
        ("../own.yaml", {}, "unknown policy '../own.yaml'"),
    ],
)
def test_settings_that_are_not_valid_are_refused_in_one_line(
    admin, policy: str, settings: object, message: str
) -> None:
    engine, http = admin
    before = engine.controller.policy
    answer = http.put("/policy", json={"policy": policy, "settings": settings})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert error["param"] in ("settings", "policy")
    assert engine.controller.policy is before


@pytest.mark.parametrize("settings", [5, [1], "x", {"kv_usage": [0.5]}, {"kv_usage": {"a": 1}}])
def test_settings_of_another_type_are_refused(admin, settings: object) -> None:
    _, http = admin
    assert http.put("/policy", json={"policy": "morph", "settings": settings}).status_code == 400


def test_settings_of_a_servers_own_policy_are_refused(started) -> None:
    engine = started(StaticPolicy("own"))
    with serving(FakeClient(control=engine.control)) as address:
        answer = httpx.put(f"{address.url}/admin/policy", json={"policy": "own", "settings": {"kv_usage": 0.5}})
    assert answer.status_code == 400
    assert "'own' takes no settings: choose from static, manual, morph" in answer.json()["error"]["message"]


def test_plan_set_sends_a_policy_file(admin, tmp_path: Path) -> None:
    engine, http = admin
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump({"policy": "morph-performance", "settings": {"slo_tpot": math.inf, "few": False}}))
    url = str(http.base_url).removesuffix("/admin/")
    done = CliRunner().invoke(app, ["plan", "set", "--policy", str(file)], env={"JAXSERVE_URL": url})
    assert done.exit_code == 0, done.stderr
    policy = engine.controller.policy
    assert isinstance(policy, MorphPolicy)
    assert (policy.name, policy.settings.few, policy.slo_tpot) == ("morph-performance", False, None)
    for text, message in (("policy: morf", "which is one of static"), ("policy: [", "is not valid YAML")):
        file.write_text(text)
        refused = CliRunner().invoke(app, ["plan", "set", "--policy", str(file)], env={"JAXSERVE_URL": url})
        assert refused.exit_code == 1
        assert message in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1


def test_server_without_variants_says_how_to_start_it(started) -> None:
    full = machine()
    sizes = {key: size for key, size in full.sizes.layers.items() if key[1] == "bfloat16"}
    resources = Resources(
        full.budget,
        type(full.sizes)(sizes, full.sizes.fixed, full.sizes.pages),
        min_pages=full.min_pages,
        max_pages=full.max_pages,
        copy_rate=full.copy_rate,
    )
    engine = started("static", resources=resources)
    with serving(FakeClient(control=engine.control)) as address:
        answer = httpx.put(f"{address.url}/admin/policy", json={"policy": "morph"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "policy morph changes layers to int4, int8, but the engine was started without int4, int8: start "
        "it with --policy morph, or with --variant int4 --variant int8"
    )


def test_layers_stay_when_the_policy_changes(started) -> None:
    """The new policy goes on from the plan in force, and returns to the plan of the start by its own rules."""
    engine = started("morph")
    home = engine.controller.plan
    changed = home.with_precisions("0", {"layers.0": "int4", "layers.1": "int4"})
    engine.control.set_plan(to_yaml(changed))
    eventually(lambda: engine.controller.plan.instances == changed.instances and not engine.controller.busy)
    before = engine.controller.plan
    engine.control.set_policy("morph", {"release_quiet": 0.5})
    assert engine.controller.plan == before
    assert engine.controller.target is None
    eventually(lambda: engine.controller.plan.instances == home.instances)
    reasons = [decision["reason"] for decision in engine.control.decisions(10)]
    assert any("layers" in reason and "to bfloat16" in reason for reason in reasons), reasons


# -- policies that do not answer


class Blocking:
    """A policy that does not answer until it is released."""

    name = "blocking"

    def __init__(self) -> None:
        self.asked, self.released = threading.Event(), threading.Event()

    def init(self, plan: InstancePlan) -> None:
        return None

    def update(self, snapshot: Snapshot, plan: InstancePlan, state: None) -> Proposal[None]:
        self.asked.set()
        self.released.wait()
        return Proposal(plan.with_kv_pages(17), None, "too late")


@pytest.fixture
def blocking() -> Iterator[Blocking]:
    policy = Blocking()
    yield policy
    policy.released.set()


def test_blocked_policy_holds_up_no_route(started, blocking, caplog) -> None:
    engine = started(blocking)
    assert blocking.asked.wait(30)
    with serving(FakeClient(control=engine.control)) as address, httpx.Client(base_url=f"{address.url}/admin") as http:
        for path in ("/decisions", "/status", "/policy", "/plan", "/ledger"):
            assert http.get(path, timeout=20).status_code == 200
        eventually(lambda: "the policy own has not answered for" in http.get("/status").json()["note"])
        assert http.put("/policy", json={"policy": "static"}, timeout=20).status_code == 202
        assert "the policy own does not answer" in caplog.text
        eventually(lambda: engine.controller.history != [])
        assert http.get("/status").json()["policy"] == "static"


def test_policy_that_follows_a_blocked_one_decides(started, blocking) -> None:
    engine = started(blocking)
    assert blocking.asked.wait(30)
    plan = engine.controller.plan.with_kv_pages("0", 300)
    engine.control.set_plan(to_yaml(plan))
    eventually(lambda: engine.controller.plan.instances == plan.instances)
    blocking.released.set()
    eventually(lambda: sum(thread.name == "jaxserve-control" for thread in threading.enumerate()) == 1)
    assert engine.controller.plan.instances == plan.instances, "the late answer changes nothing"


def test_close_leaves_a_blocked_policy_behind_with_a_warning(started, blocking, caplog) -> None:
    engine = started(blocking)
    assert blocking.asked.wait(30)
    before = engine.controller.plan
    with caplog.at_level(logging.WARNING):
        engine.control.close()
    assert "the policy own does not answer; the control plane ends without it" in caplog.text
    blocking.released.set()
    eventually(lambda: not any(thread.name == "jaxserve-control" for thread in threading.enumerate()))
    assert engine.controller.plan == before
    assert list(engine.controller.decisions) == []


# -- many instances


def test_status_of_a_thousand_instances_is_bounded(started) -> None:
    plan = home_plan(dp=1000)
    plan = plan.with_precisions("900", {"layers.3": "int4"})
    engine = started(StaticPolicy(), plan)
    status = engine.control.status()
    assert status["num_instances"] == 1000
    assert len(status["layers"]) == len(status["instances"]) == MAX_SHOWN_INSTANCES
    assert status["instances"] == [*map(str, range(MAX_SHOWN_INSTANCES - 1)), "900"]
    assert [layer["precision"] for layer in status["layers"][-1]].count("int4") == 1
    assert status["precisions"] == {"bfloat16": 15999, "int4": 1}


def test_note_of_many_instances_is_bounded(started) -> None:
    class Waiting(StaticPolicy):
        def update(self, snapshot: Snapshot, plan: InstancePlan, state: InstancePlan) -> Proposal[InstancePlan]:
            return Proposal(plan, state, "waiting for something")

    engine = started(Waiting(), home_plan(dp=100))
    eventually(lambda: engine.control.status()["note"].endswith("instance 3: waiting for something; 96 more"))


def test_plan_of_many_instances_is_set_over_http(started) -> None:
    engine = started(StaticPolicy(), home_plan(dp=200))
    with serving(FakeClient(control=engine.control)) as address, httpx.Client(base_url=f"{address.url}/admin") as http:
        body = http.get("/plan").json()
        for instance in body["instances"]:
            blocks = {f"layers.{n}": "int4" if n % 2 else "bfloat16" for n in range(16)}
            instance["stages"][0]["blocks"] = {"embed": "bfloat16"} | blocks | {"head": "bfloat16"}
        answer = http.put("/plan", json=body, timeout=60)
        assert answer.status_code == 202, answer.text
        eventually(lambda: http.get("/status").json()["precisions"] == {"bfloat16": 1600, "int4": 1600})


# -- what is measured while an engine runs


def test_policy_goes_on_with_what_was_measured(admin) -> None:
    engine, http = admin
    before, measured = engine.controller.policy, QualityLoss({"int4": [0.02] * 16}, ("int4",), 3.0)
    load = partial(load_policy, resources=MACHINE, swap_order=range(15, -1, -1), loss=measured)
    engine.control.renew(load, measured)
    assert engine.control.loss is measured
    assert engine.controller.policy is not before
    (decision,) = http.get("/decisions").json()["decisions"]
    assert decision["reason"].startswith("layers were measured: policy ")
    assert engine.control.status()["quality"]["floor"] == 0.05


def test_settings_of_an_operator_outlast_a_measurement(admin) -> None:
    engine, http = admin
    assert http.put("/policy", json={"policy": "morph", "settings": {"queue_delay": 0.5}}).status_code == 202
    engine.control.renew(partial(load_policy, resources=MACHINE, swap_order=range(16), loss=LOSS), LOSS)
    assert engine.controller.policy.settings.queue_delay == 0.5


def test_plan_beyond_the_floor_is_allowed_and_told(admin, caplog: pytest.LogCaptureFixture) -> None:
    engine, http = admin
    engine.control.renew(partial(load_policy, resources=MACHINE, swap_order=range(16), loss=LOSS), LOSS)
    for count, told in ((5, False), (6, True)):
        plan = home_plan().with_precisions("0", {f"layers.{layer}": "int4" for layer in range(count)})
        answer = http.put("/plan", content=to_yaml(plan), headers={"content-type": "application/yaml"})
        assert answer.status_code == 202, answer.text
        reason = http.get("/decisions").json()["decisions"][-1]["reason"]
        assert ("expected to lose 6.0 %, more than the floor of 5 %" in reason) == told
    assert "an operator sets a plan that is expected to lose 6.0 %" in caplog.text
