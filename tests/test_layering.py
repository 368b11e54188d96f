"""Who may import whom, proved in fresh interpreters: import-linter reads sources, these load them."""

import subprocess
import sys

import pytest

WEB = ("fastapi", "starlette", "uvicorn", "pydantic")
JAX = ("jax", "jaxlib", "flax")


def run_fresh(code: str) -> None:
    """Runs code in an interpreter that has imported nothing of ours."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def loaded(statement: str, names: tuple[str, ...]) -> str:
    return f"import sys\n{statement}\nfound = sorted(set({names!r}) & set(sys.modules))\nassert not found, found\n"


def test_import_jaxserve_is_lazy():
    run_fresh(loaded("import jaxserve; jaxserve.SamplingParams", JAX + WEB + ("numpy", "tokenizers")))


@pytest.mark.parametrize("package", ["core"])
def test_package_does_not_load_jax(package):
    run_fresh(loaded(f"import jaxserve.{package}", JAX + WEB))
