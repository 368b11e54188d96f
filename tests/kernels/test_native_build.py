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


def hanging(tmp_path):
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    return str(script)


def test_compiler_that_hangs_is_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CXX", hanging(tmp_path))
    monkeypatch.setattr(build, "COMPILER_TIME", 0.2)
    assert build.build_or_report(tmp_path / "target") is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "timed out" in said
    assert list((tmp_path / "target").iterdir()) == []


@pytest.mark.parametrize(("status", "said"), [(0, False), (1, True)])
def test_compiler_is_only_quoted_if_it_fails(quick_compiler, tmp_path, capfd, status, said):
    script = tmp_path / "c++"
    script.write_text(f"{script.read_text()}echo 'a warning' >&2\nexit {status}\n")
    build.build_or_report(tmp_path / "target")
    assert ("a warning" in capfd.readouterr().err) == said


def test_machine_without_threads_to_compile_uses_plain_xla(quick_compiler, tmp_path, monkeypatch, capsys):
    def refused(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(build.ThreadPoolExecutor, "submit", refused)
    assert build.build_or_report(tmp_path / "target") is None
    assert "can't start new thread" in capsys.readouterr().err


def test_files_that_replace_a_path_at_once_have_names_of_their_own(tmp_path):
    path = tmp_path / "library"
    with build.replacing(path) as first, build.replacing(path) as second:
        assert first != second, "two containers may have processes of the same id"
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"
    assert path.stat().st_mode & 0o444 == 0o444, "other users load it"
    assert list(tmp_path.iterdir()) == [path]


def test_folder_that_may_not_be_searched_has_no_library(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.stat", refused)
    assert build.built(tmp_path) is None


def test_command_without_a_home_folder_prints_one_line(quick_compiler, monkeypatch, capsys):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(Path, "home", no_home)
    assert build.build_or_report(None) is None
    assert capsys.readouterr().err.count("\n") == 1


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
    assert "give a folder with XDG_CACHE_HOME" in caplog.text


def test_compiler_that_does_not_know_the_matrix_unit_leaves_its_kernels_out(tmp_path, monkeypatch):
    script, said = tmp_path / "c++", tmp_path / "commands"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *-mamx*) exit 1;; esac\necho "$@" >> {said}\n'
        'while [ "$1" != -o ]; do shift; done\n: > "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert build.build(tmp_path / "target").is_file()
    commands = said.read_text()
    assert "matmul_vnni.cc" in commands
    assert "_amx" not in commands
