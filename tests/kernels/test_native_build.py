"""How the native library comes to be: at installation, without jaxserve or JAX."""

import importlib.util
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from jaxserve.kernels.native import build

PROJECT = tomllib.loads((Path(build.__file__).parents[3] / "pyproject.toml").read_text())


@pytest.fixture
def no_library(tmp_path, monkeypatch):
    """A folder without a library, and a compiler that is not there."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    return tmp_path


def test_an_installation_builds_against_the_oldest_jaxlib_that_is_supported():
    assert f"jaxlib=={build.OLDEST_JAXLIB}" in PROJECT["build-system"]["requires"]
    jax = next(name for name in PROJECT["project"]["dependencies"] if name.startswith("jax>"))
    assert jax.startswith(f"jax>={build.OLDEST_JAXLIB},")


def test_what_compiles_it_loads_neither_jaxserve_nor_jax():
    script = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('build', {build.__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(sorted({'jax', 'jaxlib', 'jaxserve', 'numpy'} & set(sys.modules)), module._headers())\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    loaded, headers = said.split(" ", 1)
    assert loaded == "[]"
    assert (Path(headers) / "xla" / "ffi" / "api" / "ffi.h").exists()


def test_without_a_compiler_one_line_says_so(no_library, capsys):
    assert build.build_or_say(no_library) is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "plain XLA is used instead" in said
    assert "no-such-compiler" in said


def test_without_jaxlib_one_line_says_so(no_library, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert build.build_or_say(no_library) is None
    assert "jaxlib" in capsys.readouterr().err


def test_a_library_of_the_oldest_jaxlib_serves_newer_ones(no_library, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "0.99.0")
    oldest, own = build.library_path(no_library, build.OLDEST_JAXLIB), build.library_path(no_library)
    assert build.built(no_library) is None
    oldest.touch()
    assert build.build(no_library) == oldest
    own.touch()
    assert build.build(no_library) == own
