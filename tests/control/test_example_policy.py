"""The example of a custom policy runs, serves a burst, and stands unchanged in the documentation."""

import subprocess
import sys
from pathlib import Path

from jaxserve.control import PlanInForce
from jaxserve.control.controller import Controller
from jaxserve.control.policies import load_policy
from tests.support.control import Fluid, VirtualActuator, home_plan, machine

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "policies" / "busy_int8.py"


def test_example_policy_script_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], cwd=ROOT, env={"PYTHONPATH": "."}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "after 7 s: 6.0 sequences waiting > 4: all layers to int8" in done.stdout
    assert "after 20 s: none waited for 5 s, 0 pages in use < half of 100: back" in done.stdout


def test_example_policy_serves_a_burst() -> None:
    home, resources, fluid = home_plan(), machine(), Fluid()
    actuator = VirtualActuator(PlanInForce(home))
    policy = load_policy(f"{EXAMPLE}:BusyInt8", resources, tuple(range(16)))
    controller, seen = Controller(actuator.in_force, policy, resources, {"0": actuator}), set()
    for number in range(1200):
        actuator.now = now = number / 10
        instance = actuator.in_force.instance("0")
        controller.tick(now, {"0": fluid.step(now, 0.1, 12.0 if now < 30 else 0.0, instance)})
        seen.add(instance.layer_precisions)
    assert ("int8",) * 16 in seen
    assert controller.plan.instances == home.instances
    assert {decision.outcome for decision in controller.decisions} == {"done"}


def test_adaptation_manual_shows_the_example_policy() -> None:
    source = EXAMPLE.read_text()
    policy = source[source.index("@dataclass") : source.index("def main")].strip()
    assert policy in (ROOT / "docs" / "adaptation.md").read_text()
