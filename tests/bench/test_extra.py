"""What `jaxserve bench` and `jaxserve profile` say where the packages of the extra `bench` are not installed."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxserve.bench.result import save
from jaxserve.cli.main import app
from jaxserve.core.extras import require_extra
from tests.bench.simulated import result

INSTALL = 'pip install "jaxserve[bench]"'


@pytest.fixture(autouse=True)
def without_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `aiohttp` and `matplotlib`, and the modules that use them, be imported no more."""
    users = (
        "jaxserve.bench.client",
        "jaxserve.bench.run",
        "jaxserve.bench.report",
        "jaxserve.calibration.sensitivity.plot",
    )
    for name in [name for name in sys.modules if name.startswith(users)]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("aiohttp", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    ("line", "package"),
    [
        ("bench serve --num-prompts 1", "aiohttp"),
        ("bench trace --synthetic azure-burst", "aiohttp"),
        ("bench compare --run a= --run b=", "aiohttp"),
        ("bench latency --calibrate here.yaml", "aiohttp"),
        ("bench report a.json", "matplotlib"),
        ("profile --compare-orders", "matplotlib"),
    ],
)
def test_commands_name_the_missing_package_and_the_line_that_installs_it(line: str, package: str):
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 1
    assert done.output.count("\n") == 1
    assert done.output.endswith(f" needs {package}, which is not installed: {INSTALL}\n")


def test_results_are_compared_without_the_extra(tmp_path: Path):
    for name in ("a.json", "b.json"):
        save(result(label=name), tmp_path / name)
    done = CliRunner().invoke(app, ["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    assert done.exit_code == 0, done.exception


def test_installed_packages_are_no_error():
    require_extra("bench", "json", purpose="this test")
