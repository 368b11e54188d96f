"""The native library's build during an installation, without jaxserve or JAX."""

import importlib.util
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from jaxserve.kernels.native import build, library
from tests.support.internals import native_library_path

PROJECT = tomllib.loads((Path(build.__file__).parents[3] / "pyproject.toml").read_text())


@pytest.fixture
def no_library(tmp_path, monkeypatch):
    """A folder without a library, and a compiler that does not exist."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    return tmp_path


def test_build_requirement_is_the_oldest_supported_jaxlib():
    assert f"jaxlib=={build.OLDEST_JAXLIB}" in PROJECT["build-system"]["requires"]
    jax = next(name for name in PROJECT["project"]["dependencies"] if name.startswith("jax>"))
    assert jax.startswith(f"jax>={build.OLDEST_JAXLIB},")


def test_native_build_loads_neither_jaxserve_nor_jax():
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


def test_native_build_without_a_compiler_prints_one_line(no_library, capsys):
    assert build.build_or_report(no_library) is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "plain XLA is used instead" in said
    assert "no-such-compiler" in said


def test_native_build_without_jaxlib_prints_one_line(no_library, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert build.build_or_report(no_library) is None
    assert "jaxlib" in capsys.readouterr().err


def test_native_library_of_the_oldest_jaxlib_is_used_by_newer_ones(no_library, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "0.99.0")
    oldest, own = build.library_path(no_library, build.OLDEST_JAXLIB), build.library_path(no_library)
    assert build.built(no_library) is None
    oldest.touch()
    assert build.build(no_library) == oldest
    own.touch()
    assert build.build(no_library) == own


@pytest.fixture
def quick_compiler(tmp_path, monkeypatch):
    """A compiler that writes empty files, and a package folder without a library."""
    script = tmp_path / "c++"
    script.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(library, "HERE", tmp_path / "site-packages")


def test_native_build_leaves_only_the_library(quick_compiler, tmp_path):
    sources = set(build.HERE.iterdir())
    found = build.build(tmp_path / "target")
    assert list((tmp_path / "target").iterdir()) == [found]
    assert set(build.HERE.iterdir()) == sources


def test_failed_native_build_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(subprocess.CalledProcessError):
        build.build(tmp_path / "target")
    assert list((tmp_path / "target").iterdir()) == []


def test_package_without_a_library_compiles_one_into_the_users_cache(quick_compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = native_library_path().__wrapped__()
    assert found == build.library_path(tmp_path / "cache" / "jaxserve" / "native")
    assert found.is_file()
    assert not (tmp_path / "site-packages").exists()


@pytest.mark.parametrize("cache", ["/proc/cache", ""], ids=["not-writable", "no-home"])
def test_package_without_a_writable_cache_uses_plain_xla(quick_compiler, monkeypatch, caplog, cache):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setattr(Path, "home", no_home)
    assert native_library_path().__wrapped__() is None
    assert "using the slower plain XLA" in caplog.text
