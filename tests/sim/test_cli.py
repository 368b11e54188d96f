"""`jaxserve sim` from outside."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxserve.cli.main import app
from jaxserve.sim.hardware import to_yaml
from tests.sim.machines import CPU

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys
from jaxserve.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
loaded = sorted({"jax", "jaxlib", "flax", "fastapi", "uvicorn"} & set(sys.modules))  # Typer itself loads pydantic
assert not loaded, loaded
"""


@pytest.fixture
def hardware(tmp_path: Path) -> str:
    (tmp_path / "small.yaml").write_text(to_yaml(CPU))
    return str(tmp_path / "small.yaml")


def invoked(*args: str):
    return CliRunner().invoke(app, ["sim", *args, "--quiet"])


def test_a_run_loads_no_jax_and_saves_a_result(hardware, tmp_path) -> None:
    options = ("--policy", "morph", "--memory-gb", "1.3", "--synthetic", "azure-conv", "--duration", "5", "--rate", "4")
    saved = tmp_path / "result.json"
    command = [sys.executable, "-c", RUN, "sim", "--hardware", hardware, *options, "--save-result", str(saved)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Mean TTFT (ms)" in done.stdout
    result = json.loads(saved.read_text())
    assert result["kind"] == "trace"
    assert result["simulated"] is True
    assert result["decisions"] == []


def test_names_of_hardware_and_models_are_those_of_configs(tmp_path) -> None:
    saved = tmp_path / "r.json"
    names = ("--hardware", "a100-80", "--model", "llama-3-8b", "--cluster", "4", "--tp", "2", "--label", "two")
    load = ("--num-prompts", "20", "--request-rate", "5", "--input-len", "100", "--goodput", "ttft:500", "tpot:50")
    done = invoked(*names, *load, "--output-len", "10", "--burstiness", "0.5", "--save-result", str(saved))
    assert done.exit_code == 0, done.output
    result = json.loads(saved.read_text())
    assert [result[key] for key in ("label", "hardware", "dp", "num_prompts", "burstiness")] == [
        "two",
        "a100-80",
        2,
        20,
        0.5,
    ]
    assert result["slo"] == {"ttft": 500, "tpot": 50}


def test_mistakes_are_one_line_and_exit_status_1(hardware) -> None:
    cases = (((), "no hardware is given"), (("--hardware", hardware, "--cluster", "x"), "--cluster is 'x'"))
    for args, message in cases:
        done = invoked(*args)
        assert done.exit_code == 1
        assert message in done.output
        assert "Traceback" not in done.output


def test_a_run_in_which_nothing_is_answered_ends_with_status_1(hardware) -> None:
    done = invoked("--hardware", hardware, "--num-prompts", "3", "--input-len", "5000")
    assert done.exit_code == 1
    assert "the prompt has 5000 tokens" in done.output


def test_help_is_in_groups() -> None:
    text = CliRunner().invoke(app, ["sim", "--help=all"]).output
    for panel in ("Model", "Cluster", "Memory", "Adaptation", "Scheduling", "Dataset", "Arrivals", "Trace", "Result"):
        assert f"\n{panel}:\n" in text, panel
