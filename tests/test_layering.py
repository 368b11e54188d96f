"""Import rules, proved in fresh interpreters: import-linter reads sources, these tests load modules."""

import ast
import importlib.metadata
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import jaxserve

ROOT = Path(__file__).resolve().parents[1]
WEB = ("fastapi", "starlette", "uvicorn", "pydantic")
JAX = ("jax", "jaxlib", "flax")
JAX_FREE = (
    "jaxserve.core",
    "jaxserve.console",
    "jaxserve.hub",
    "jaxserve.kvcache",
    "jaxserve.scheduler",
    "jaxserve.control",
    "jaxserve.telemetry",
    "jaxserve.engine",
    "jaxserve.planning.memory",
    "jaxserve.planning.spec",
    "jaxserve.sim",
)
COMES_WITH = {  # always installed together
    "pydantic-core": "pydantic",
    "jaxlib": "jax",
}
PUBLIC = [name for name in jaxserve.__all__ if name != "__version__"]

BLOCK_WEB = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {WEB!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
sys.meta_path.insert(0, Blocker())
"""


def run_fresh(code: str) -> None:
    """Run code in an interpreter that has imported nothing of jaxserve."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def assert_not_loaded(names: tuple[str, ...]) -> str:
    return f"import sys; found = sorted(set({names!r}) & set(sys.modules)); assert not found, found\n"


def modules_of(package: str) -> list[str]:
    """Return a package and every module below it, found without importing them."""
    path = ROOT / package.replace(".", "/")
    found = pkgutil.walk_packages([str(path)], prefix=f"{package}.")
    return [package, *(module.name for module in found)]


def imports_of(file: Path) -> set[str]:
    """Return the full names that a file imports anywhere."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_import_jaxserve_loads_nothing_heavy():
    run_fresh("import jaxserve; jaxserve.SamplingParams\n" + assert_not_loaded((*JAX, *WEB, "numpy", "tokenizers")))


@pytest.mark.parametrize("package", JAX_FREE)
def test_package_does_not_load_jax(package):
    run_fresh(f"import {', '.join(modules_of(package))}\n" + assert_not_loaded((*JAX, *WEB)))


def test_bench_client_loads_neither_jax_nor_a_web_framework():
    online = [name for name in modules_of("jaxserve.bench") if ".offline" not in name]
    run_fresh(f"import {', '.join(online)}\n" + assert_not_loaded((*JAX, *WEB)))


def test_command_line_starts_without_its_commands_dependencies():
    heavy = ("numpy", "httpx2", "matplotlib", "tokenizers")
    run_fresh("import jaxserve.cli.main\n" + assert_not_loaded((*JAX, *WEB, *heavy)))


def test_engine_and_library_work_without_web_framework():
    code = BLOCK_WEB + f"import jaxserve, jaxserve.build\nfor name in {PUBLIC!r}: getattr(jaxserve, name)\n"
    run_fresh(code + assert_not_loaded(WEB))


def test_opentelemetry_is_loaded_for_traces_alone():
    run_fresh(
        "import jaxserve.build, jaxserve.server.app\n" + assert_not_loaded(("opentelemetry.sdk", "google.protobuf"))
    )


def test_blocked_web_framework_is_really_blocked():
    with pytest.raises(AssertionError, match="fastapi is blocked"):
        run_fresh(BLOCK_WEB + "import fastapi\n")


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_resolves(name):
    assert getattr(jaxserve, name).__name__ == name


def test_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = jaxserve.Engine


def test_models_import_no_sharding():
    files = sorted((ROOT / "jaxserve" / "models").glob("*.py"))
    assert files
    for file in files:
        assert not {name for name in imports_of(file) if name.startswith("jax.sharding")}, file


def test_every_third_party_import_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + extras["bench"] + extras["otlp"]
    declared = {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in lines}
    homes = importlib.metadata.packages_distributions()
    files = sorted((ROOT / "jaxserve").rglob("*.py"))
    assert files
    for file in files:
        for top in {name.partition(".")[0] for name in imports_of(file)} - sys.stdlib_module_names:
            if top in ("jaxserve", "pallas_kernels"):
                continue
            distributions = {home.lower().replace("_", "-") for home in homes.get(top, [top])}
            distributions |= {COMES_WITH[home] for home in distributions & COMES_WITH.keys()}
            assert distributions & declared, f"{file.relative_to(ROOT)} imports {top}"


def installed_with(lines: list[str]) -> set[str]:
    """Return the names of all packages that requirements install here, as the installed packages say."""
    todo, seen = [Requirement(line) for line in lines], set()
    while todo:
        requirement = todo.pop()
        for extra in ("", *requirement.extras):
            key = (canonicalize_name(requirement.name), extra)
            if key in seen:
                continue
            seen.add(key)
            needed = map(Requirement, importlib.metadata.requires(requirement.name) or ())
            todo += [other for other in needed if other.marker is None or other.marker.evaluate({"extra": extra})]
    return {name for name, _ in seen}


def test_plain_installation_stays_small():
    """A new package in the core needs a reason that outweighs everybody's installation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = installed_with(project["dependencies"])
    assert len(packages) <= 60, sorted(packages)
    assert not packages & {"torch", "transformers", "matplotlib", "aiohttp", "safetensors", "httpx"}


def test_every_dependency_has_its_reason():
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)[1]
    lines = [line for line in block.splitlines() if line.strip().startswith('"')]
    assert lines
    assert not [line for line in lines if not re.search(r"# \S", line)]
